"""What the runner asks of whatever computes logits: a torch model, or a simulation of one."""

from typing import TYPE_CHECKING, Protocol

from worker.steps.batch import StepBatch

if TYPE_CHECKING:
    import torch


class Forward(Protocol):
    """Weights, KV memory and the forward pass. One instance a process."""

    num_pages: int  # of layers that attend to all positions; 0 = there are none
    window: int  # of the other layers, the largest, if these have pages of their own
    window_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int
    device: str
    dtype: str

    def forward(self, batch: StepBatch) -> "torch.Tensor":
        """Write this step's K/V into the pages and return logits [S, vocab] float32 of `batch.logit_tokens`."""
