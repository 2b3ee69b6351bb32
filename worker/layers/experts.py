"""Mixtures of experts: a router and several MLPs, of which each token uses a few (Shazeer et al. 2017)."""

import torch

from worker.layers.ops import Experts, Ops, Routes
from worker.layers.parameter import Parameter
from worker.ranks.group import Group


class Router:
    """Weights of experts for each token, from a linear map kept in float32, where ties are rare."""

    def __init__(
        self, ops: Ops, hidden: int, experts: int, *, count: int, renormalise: bool, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._count = count
        self._renormalise = renormalise
        self._weight = torch.empty(experts, hidden, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}.weight", self._weight)]

    def pack(self) -> None:
        self._weight = self._ops.pack(self._weight.float())

    def __call__(self, x: torch.Tensor) -> Routes:
        """Of each row of x [N, hidden]."""
        return self._ops.route(self._ops.linear(x.float(), self._weight), self._count, self._renormalise)


class Mixture:
    """Σ weight × expert(x), SwiGLU MLPs, over the experts that the router chose; rounded once.

    Ranks share every expert's inner features: all route alike, and add up once.
    """

    def __init__(
        self,
        ops: Ops,
        group: Group,
        hidden: int,
        inner: int,
        experts: int,
        *,
        count: int,
        renormalise: bool,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self._group = group
        self._inner = group.share_features(inner)
        self.router = Router(ops, hidden, experts, count=count, renormalise=renormalise, dtype=dtype)
        self._gate_up = torch.empty(experts, 2 * self._inner.size, hidden, dtype=dtype)
        self._down = torch.empty(experts, hidden, self._inner.size, dtype=dtype)
        self._experts: Experts  # once packed

    def parameters(self, prefix: str) -> list[Parameter]:
        found = self.router.parameters(f"{prefix}.router")
        inner = self._inner
        for index, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            name = f"{prefix}.experts.{index}"
            found.append(Parameter(f"{name}.gate.weight", gate_up[: inner.size], share=inner))
            found.append(Parameter(f"{name}.up.weight", gate_up[inner.size :], share=inner))
            found.append(Parameter(f"{name}.down.weight", down, share=inner, dim=1))
        return found

    def pack(self) -> None:
        """Once filled: put the weights into the layout of the device."""
        self.router.pack()
        self._experts = self._ops.experts(self._gate_up, self._down)
        self._gate_up = self._down = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, hidden]."""
        return self._group.sum(self._experts(x, self.router(x))).to(x.dtype)
