"""Gated feed-forward networks (Shazeer 2020)."""

from collections.abc import Callable

import torch

from worker.layers.linear import Linear, RowLinear
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.ranks.group import Group


class GatedMLP:
    """down(activation(gate(x)) × up(x)): SwiGLU or GeGLU, by the operation given. Ranks share the inner features."""

    def __init__(
        self,
        ops: Ops,
        group: Group,
        hidden: int,
        inner: int,
        gate: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        """`gate`: [N, 2 × inner] = gate | up → [N, inner], like `Ops.silu_mul`."""
        self._gate = gate
        part = group.share_features(inner)
        self.gate_up = Linear(ops, hidden, {"gate": part, "up": part}, bias=bias, dtype=dtype)
        self.down = RowLinear(ops, group, part, "down", hidden, bias=bias, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return self.gate_up.parameters(prefix) + self.down.parameters(prefix)

    def pack(self) -> None:
        """Once filled: put the weights into the layout of the device."""
        self.gate_up.pack()
        self.down.pack()

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a result that has no bias: the sum over ranks is the whole."""
        return self.down.partial(self._gate(self.gate_up(x)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → the same shape."""
        return self.down(self._gate(self.gate_up(x)))
