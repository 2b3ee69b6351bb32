"""Linear maps, alone or several merged into one product, and how ranks share them."""

import torch

from proto.division import Share
from worker.layers.gemm_shape import GemmShape
from worker.layers.module import Module, Target
from worker.layers.ops import Packed
from worker.layers.parameter import Parameter


class _Product(Module):
    """A matrix product with a weight [out, in] of this rank, and maybe a bias [out]."""

    def __init__(self, target: Target, weight: Parameter, bias: Parameter | None) -> None:
        self.out_features, self.in_features = weight.tensor.shape
        self.dtype = target.dtype
        self.weight = weight
        self.bias = bias
        self.packed: Packed = None  # what `Ops.pack` makes of the weight
        self._ops = target.ops
        self._group = target.group

    def pack(self) -> None:
        self.packed = self._ops.pack(self.weight.release())

    def gemm_shapes(self, tokens: int, sampled: int) -> list[GemmShape]:
        return [GemmShape(self.out_features, self.in_features, self.dtype, tokens)]

    def _biased(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y + self.bias.tensor


class Linear(_Product):
    """y = x Wᵀ + b, for one map or for several that share their input, merged by rows of W.

    Each rank has its share of every map's output features, from the whole of x.
    """

    def __init__(
        self, target: Target, in_features: int, parts: Share | dict[str, Share], *, bias: bool = False
    ) -> None:
        """`parts`: the output features of the only map, or of each by name, in the order of the output's columns."""
        self.parts = parts if isinstance(parts, dict) else {"": parts}
        size = sum(part.size for part in self.parts.values())
        super().__init__(
            target,
            Parameter(torch.empty(size, in_features, dtype=target.dtype), self.parts),
            Parameter(torch.empty(size, dtype=target.dtype), self.parts) if bias else None,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._biased(self._ops.linear(x, self.packed))


class RowLinear(_Product):
    """y = x Wᵀ + b, where each rank has its share of x's features and so a part of the sum."""

    def __init__(self, target: Target, in_features: Share, out_features: int, *, bias: bool = False) -> None:
        super().__init__(
            target,
            Parameter(torch.empty(out_features, in_features.size, dtype=target.dtype), {"": in_features}, dim=1),
            Parameter(torch.empty(out_features, dtype=target.dtype)) if bias else None,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._biased(self._group.sum(self._ops.linear(x, self.packed)))
