"""Reference arithmetic: plain PyTorch in float32, row by row."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from worker.cpu.experts import PlainExperts
from worker.layers.ops import Experts, Routes


class ReferenceOps:
    """Batch-invariant by construction: each row is a computation of its own, of the same shape every time."""

    row_multiple = 1

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    def linear(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return _by_row(lambda row: F.linear(row, packed), x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _by_row(lambda row: row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + eps) * weight.float(), x)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        def activate(row: torch.Tensor) -> torch.Tensor:
            gate, up = row.chunk(2, dim=-1)
            return F.silu(gate) * up

        return _by_row(activate, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        def activate(row: torch.Tensor) -> torch.Tensor:
            gate, up = row.chunk(2, dim=-1)
            return F.gelu(gate, approximate="tanh") * up

        return _by_row(activate, gate_up)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return _by_row(lambda row: F.gelu(row, approximate="tanh"), x)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return _by_row(lambda row: F.layer_norm(row, row.shape, weight.float(), bias.float(), eps), x)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return _by_row(lambda row: cap * torch.tanh(row / cap), x)

    def route(self, logits: torch.Tensor, count: int, renormalise: bool) -> Routes:
        chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        weights = _by_row(lambda row: row.softmax(-1), logits).gather(1, chosen)
        return Routes(chosen.int(), _by_row(lambda row: row / row.sum(), weights) if renormalise else weights)

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
        return PlainExperts(self, gate_up, down)


def _by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of each row [features] in float32, on aligned memory of its own; back in the dtype of x."""
    return torch.stack([function(row.to(torch.float32, copy=True)) for row in x]).to(x.dtype)
