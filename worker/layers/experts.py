"""Mixtures of experts: a router and several MLPs, of which each token uses a few (Shazeer et al. 2017)."""

import torch

from proto.division import Share
from worker.layers.gemm_shape import GemmShape
from worker.layers.module import Module, Target
from worker.layers.ops import Experts, Packed, Routes
from worker.layers.parameter import Parameter


class Router(Module):
    """Weights of experts for each token, from a linear map kept in float32, where ties are rare."""

    def __init__(self, target: Target, hidden: int, experts: int, *, count: int, renormalise: bool) -> None:
        self.out_features, self.in_features = experts, hidden
        self.weight = Parameter(torch.empty(experts, hidden, dtype=target.dtype))
        self.packed: Packed = None  # what `Ops.pack` makes of the weight in float32
        self.count = count
        self.renormalise = renormalise
        self._ops = target.ops

    def pack(self) -> None:
        self.packed = self._ops.pack(self.weight.release().float())

    def gemm_shapes(self, tokens: int, sampled: int) -> list[GemmShape]:
        return [GemmShape(self.out_features, self.in_features, torch.float32, tokens)]

    def __call__(self, x: torch.Tensor) -> Routes:
        """Choose for each row of x [N, hidden]."""
        return self._ops.route(self._ops.linear(x.float(), self.packed), self.count, self.renormalise)


class _Weight(Module):
    """One expert's slice of the tensor that holds a map of all experts."""

    def __init__(self, tensor: torch.Tensor, parts: dict[str, Share], dim: int = 0) -> None:
        self.weight = Parameter(tensor, parts, dim)


class _Expert(Module):
    """The parameters of one expert's MLP, as slices of all experts'."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, inner: Share) -> None:
        self.gate_up = _Weight(gate_up, {"gate": inner, "up": inner})
        self.down = _Weight(down, {"": inner}, dim=1)


class Mixture(Module):
    """Σ weight × expert(x), SwiGLU MLPs, over the experts that the router chose; rounded once.

    Ranks share every expert's inner features: all route alike, and add up once.
    """

    def __init__(self, target: Target, hidden: int, inner: int, experts: int, *, count: int, renormalise: bool) -> None:
        part, dtype = target.group.share_features(inner), target.dtype
        self.router = Router(target, hidden, experts, count=count, renormalise=renormalise)
        self.gate_up = torch.empty(experts, 2 * part.size, hidden, dtype=dtype)  # until packed, as is `down`
        self.down = torch.empty(experts, hidden, part.size, dtype=dtype)
        self.experts = [_Expert(*tensors, part) for tensors in zip(self.gate_up, self.down, strict=True)]
        self.hidden, self.inner, self.dtype = hidden, part.size, dtype
        self.packed: Experts  # what `Ops.experts` makes of the weights
        self._ops = target.ops
        self._group = target.group

    def pack(self) -> None:
        super().pack()
        self.experts = []
        self.packed = self._ops.experts(self.gate_up, self.down)
        self.gate_up = self.down = torch.empty(0)

    def gemm_shapes(self, tokens: int, sampled: int) -> list[GemmShape]:
        return [
            *super().gemm_shapes(tokens, sampled),
            GemmShape(2 * self.inner, self.hidden, self.dtype, tokens),
            GemmShape(self.hidden, self.inner, self.dtype, tokens),
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, hidden]."""
        return self._group.sum(self.packed(x, self.router(x))).to(x.dtype)
