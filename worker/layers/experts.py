"""Mixtures of experts: a router and several MLPs, of which each token uses a few (Shazeer et al. 2017)."""

import torch

from worker.layers.mlp import GatedMLP
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.parallel import Group


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, experts] float32, 0 for experts that a token does not use."""
        return self._ops.route(self._ops.linear(x.float(), self._weight), self._count, self._renormalise)


class Mixture:
    """Σ weight × expert(x), SwiGLU MLPs, over the experts that the router chose.

    Each expert computes its tokens in one product, padded as `Ops.linear` wants, so that a token's part does not
    depend on who else chose the expert. Parts are added in float32 in the order of the experts, and rounded once.
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
        self._row_multiple = ops.row_multiple
        self._group = group
        self.router = Router(ops, hidden, experts, count=count, renormalise=renormalise, dtype=dtype)
        self.experts = [GatedMLP(ops, group, hidden, inner, ops.silu_mul, dtype=dtype) for _ in range(experts)]

    def parameters(self, prefix: str) -> list[Parameter]:
        found = self.router.parameters(f"{prefix}.router")
        for index, expert in enumerate(self.experts):
            found += expert.parameters(f"{prefix}.experts.{index}")
        return found

    def pack(self) -> None:
        self.router.pack()
        for expert in self.experts:
            expert.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, hidden]."""
        weights = self.router(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in (weights != 0).any(0).nonzero().flatten().tolist():
            weight = weights[:, index]
            tokens = weight.nonzero().flatten()
            count = len(tokens)
            padded = torch.nn.functional.pad(tokens, (0, -count % self._row_multiple))  # with token 0 again
            out[tokens] += weight[tokens].unsqueeze(1) * self.experts[index].partial(x[padded])[:count].float()
        return self._group.sum(out).to(x.dtype)
