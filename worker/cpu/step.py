"""The forward pass of a step on the CPU."""

import torch

from proto.messages import WorkerFacts
from worker.layers.attention import AttentionBackend
from worker.models.base import Model
from worker.steps.batch import StepBatch


class CpuStep:
    """Model and attention, and how both are put to work on a batch."""

    def __init__(self, facts: WorkerFacts, model: Model, attention: AttentionBackend, row_multiple: int) -> None:
        """`row_multiple`: see `Ops`."""
        self.facts = facts
        self.model = model
        self.attention = attention
        self._row_multiple = row_multiple

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Write the step's K/V into the pages and return logits [S, vocab] float32 of `batch.logit_tokens`."""
        self.attention.plan(batch)
        ids = self._padded(torch.from_numpy(batch.token_ids))
        hidden = self.model.hidden(ids, torch.from_numpy(batch.positions), self.attention)
        sampled = len(batch.logit_tokens)
        if not sampled:
            return torch.empty(0, self.facts.vocab_size)
        rows = self._padded(torch.from_numpy(batch.logit_tokens))
        return self.model.logits(hidden[rows])[:sampled]

    def _padded(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [n] → with zeros up to a multiple of the rows that matrix products want."""
        return torch.nn.functional.pad(indices, (0, -len(indices) % self._row_multiple))
