"""The arithmetic below layers; each kind of device implements it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Routes(NamedTuple):
    """The experts that each of N tokens uses, all different, in an order that follows from its own logits."""

    experts: torch.Tensor  # [N, k] int32
    weights: torch.Tensor  # [N, k] float32


Packed = Any  # a weight as a device lays it out, which only the `Ops` that packed it can read
Experts = Callable[[torch.Tensor, Routes], torch.Tensor]  # x [N, hidden] → [N, hidden] float32, see `Ops.experts`


class Ops(Protocol):
    """Batch-invariant row-wise arithmetic: the bits of a row do not depend on the rows around it.

    Matrices are [N, features] in the model's dtype, with N a multiple of `row_multiple`: the model pads once.
    Each result is computed in float32 and rounded once.
    """

    row_multiple: int

    def pack(self, weight: torch.Tensor) -> Packed:
        """Lay a weight [out, in] out as `linear` wants it. The original may be freed."""

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [N, in] × weightᵀ → [N, out], in the dtype of x, which is the weight's."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / √(mean(x²) + eps) × weight over the last dimension (Zhang & Sennrich 2019)."""

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its `rms_norm`; the norm may be that of the sum before rounding.

        x and delta may be overwritten and must not be used again.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) × up of [N, 2i] = gate | up → [N, i]."""

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) × up of [N, 2i] = gate | up → [N, i], as `gelu`."""

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """x/2 × (1 + tanh(√(2/π) (x + 0.044715 x³))) of each element (Hendrycks & Gimpel 2016)."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / √(variance + eps) × weight + bias over the last dimension (Ba et al. 2016)."""

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap × tanh(x / cap) of each element."""

    def route(self, logits: torch.Tensor, count: int, renormalise: bool) -> Routes:
        """Choose the `count` most probable experts of each row of a router's logits [N, experts] float32.

        Of equals the first ones win. Weights are softmax probabilities, made to sum to 1 if `renormalise`.
        """

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        """Σ weight × down(silu(gate) × up) over the experts that each row uses, as a function of x and routes.

        gate_up [experts, 2i, hidden] = gate | up and down [experts, hidden, i] may be freed. Each expert's result is
        rounded to the dtype of x; they are added in float32, in an order that follows from the row alone.
        """
