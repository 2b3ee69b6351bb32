"""The contract between models and attention backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from proto.division import Share, whole
from proto.model import ModelConfig
from worker.device import DeviceError
from worker.ranks.group import Group
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
    dtype: "torch.dtype"  # of activations, and of K and V unless they are stored in another
    scale: float  # of q·k, usually 1/√head_dim
    logits_soft_cap: float = 0.0  # c > 0: scaled scores s become c·tanh(s/c) before the mask (Gemma 2); 0 = off
    alibi: bool = False  # slope(head) × (key position - query position) is added to scores (Press et al. 2022)
    heads: Share | None = None  # which of the model's heads these are; None = all
    window_pages: int = 0  # of layers with a window, if these have pages of their own; 0 = all layers have `num_pages`

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        group: Group,
        *,
        dtype: "torch.dtype",
        page_size: int,
        num_pages: int,
        window_pages: int,
    ) -> "AttentionShape":
        """Return the shape of this rank's share of a model."""
        heads, kv_heads = group.share_heads(config)
        return cls(
            num_layers=config.num_layers,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            head_dim=config.head_dim,
            windows=config.windows,
            page_size=page_size,
            num_pages=num_pages,
            dtype=dtype,
            scale=config.attention_scale or config.head_dim**-0.5,
            logits_soft_cap=config.attention_soft_cap,
            alibi=config.alibi,
            heads=heads,
            window_pages=window_pages,
        )

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def group_of(self, window: int) -> int:
        """Return the cache group of layers with this window (0 = none): see `proto.cache`."""
        return 1 if self.window_pages and window else 0

    @property
    def groups(self) -> tuple[int, ...]:
        """Cache groups that have layers."""
        return tuple(sorted({self.group_of(self.window_of(layer)) for layer in range(self.num_layers)}))

    def layers_of(self, group: int) -> list[int]:
        """Return the layers of a cache group."""
        return [layer for layer in range(self.num_layers) if self.group_of(self.window_of(layer)) == group]

    def pages_of(self, layer: int) -> int:
        """Return how many pages this layer has."""
        return self.window_pages if self.group_of(self.window_of(layer)) else self.num_pages

    def slopes(self) -> npt.NDArray[np.float32]:
        """Return ALiBi's slopes of these heads, [num_heads]."""
        heads = self.heads or whole(self.num_heads)
        return alibi_slopes(heads.total)[heads.start : heads.stop]


def alibi_slopes(heads: int) -> npt.NDArray[np.float32]:
    """Return each head's slope, [heads] float32: what a score loses for each position of distance (Press et al. 2022).

    For n heads, a power of two, 2^(-8/n), 2^(-16/n), …, 2^-8. For other numbers those of the largest power of two
    below, then every second one of twice that power, as the paper's authors do.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = np.arange(1, power + 1) * (-8.0 / power)
    between = np.arange(1, 2 * (heads - power), 2) * (-4.0 / power)
    return (2.0 ** np.concatenate([exponents, between])).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a step's q and k (RoPE), dimension i with i + d/2."""

    positions: "torch.Tensor"  # [T ≤ N] int32, of the device
    cos: "torch.Tensor"  # [max_position, d/2] float32
    sin: "torch.Tensor"


class AttentionBackend(Protocol):
    """Owns the KV memory; `plan` once a step, then `run` for each layer in order."""

    def plan(self, batch: StepBatch) -> None:
        """Prepare for a step's rows; forget those of the step before."""

    def run(
        self, layer: int, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", rotation: Rotation | None = None
    ) -> "torch.Tensor":
        """Write K and V of the step's T tokens into their pages, then attend causally, with scores as the shape says.

        q [N, heads, d], k and v [N, kv_heads, d] in the backend's dtype; N ≥ T, rows from T on are padding. With a
        `rotation` q and k are rotated first, computed in float32 and rounded once; they may be overwritten. Returns
        [N, heads × d] in the same dtype; padding rows are zero.
        """


BackendT = TypeVar("BackendT")


def choose_backend(backends: Mapping[str, BackendT], name: str, device: str) -> BackendT:
    """Return the backend of this name; "auto" is the first. Raises DeviceError, which lists the names."""
    names = ("auto", *backends)
    if name not in names:
        raise DeviceError(f"--attention-backend {name}: --device {device} offers {', '.join(names)}")
    return next(iter(backends.values())) if name == "auto" else backends[name]
