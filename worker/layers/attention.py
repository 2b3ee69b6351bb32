"""What a model asks of attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from worker.layers.alibi import alibi_slopes
from worker.ranks.group import Share, whole
from worker.steps.batch import StepBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of the attention layers and of their KV memory."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]  # per layer; 0 = full attention, W = the last W positions, itself included
    page_size: int
    num_pages: int
    dtype: "torch.dtype"  # of K, V and activations
    scale: float  # of q·k, usually 1/√head_dim
    logits_soft_cap: float = 0.0  # c > 0: scaled scores s become c·tanh(s/c) before the mask (Gemma 2); 0 = off
    alibi: bool = False  # slope(head) × (key position - query position) is added to scores (Press et al. 2022)
    heads: Share | None = None  # which of the model's heads these are; None = all
    window_pages: int = 0  # of layers with a window, if these have pages of their own; 0 = all layers have `num_pages`

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def group_of(self, window: int) -> int:
        """The cache group of layers with this window (0 = none): see `proto.cache`."""
        return 1 if self.window_pages and window else 0

    def pages_of(self, layer: int) -> int:
        """Pages of K and V in this layer."""
        return self.window_pages if self.group_of(self.window_of(layer)) else self.num_pages

    def slopes(self) -> npt.NDArray[np.float32]:
        """ALiBi's, of these heads [num_heads]."""
        heads = self.heads or whole(self.num_heads)
        return alibi_slopes(heads.total)[heads.start : heads.stop]


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a step's q and k are to be rotated (RoPE), dimension i with i + d/2."""

    positions: "torch.Tensor"  # [T ≤ N] int32, of the device
    cos: "torch.Tensor"  # [max_position, d/2] float32
    sin: "torch.Tensor"


class AttentionBackend(Protocol):
    """Owns the KV memory; `plan` once a step, then `run` for each layer in order."""

    def plan(self, batch: StepBatch) -> None:
        """Take in the step's rows. Nothing of an earlier step is kept."""

    def run(
        self, layer: int, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", rotation: Rotation | None = None
    ) -> "torch.Tensor":
        """Write K and V of the step's T tokens into their pages, then attend causally, with scores as the shape says.

        q [N, heads, d], k and v [N, kv_heads, d] in the backend's dtype; N ≥ T, rows from T on are padding. With a
        `rotation` q and k are rotated first, computed in float32 and rounded once; they may be overwritten. Returns
        [N, heads × d] in the same dtype; padding rows are zero.
        """
