"""Linear maps, alone or several merged into one product, and how ranks share them."""

import torch

from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.ranks.group import Group, Share


class Linear:
    """y = x Wᵀ + b, for one map or for several that share their input, merged by rows of W.

    Each rank has its share of every map's output features, from the whole of x.
    """

    def __init__(
        self, ops: Ops, in_features: int, parts: dict[str, Share], *, bias: bool = False, dtype: torch.dtype
    ) -> None:
        """`parts`: name of each map and its output features, in the order of the output's columns."""
        self._ops = ops
        self._parts = parts
        out_features = sum(part.size for part in parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def parameters(self, prefix: str) -> list[Parameter]:
        found = []
        start = 0
        for name, part in self._parts.items():
            rows = slice(start, start + part.size)
            found.append(Parameter(f"{prefix}.{name}.weight", self.weight[rows], share=part))
            if self.bias is not None:
                found.append(Parameter(f"{prefix}.{name}.bias", self.bias[rows], share=part))
            start += part.size
        return found

    def pack(self) -> None:
        """Once filled: put the weight into the layout of the device."""
        self.weight = self._ops.pack(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ops.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


class RowLinear:
    """y = x Wᵀ + b, where each rank has its share of x's features and so a part of the sum."""

    def __init__(
        self,
        ops: Ops,
        group: Group,
        in_features: Share,
        name: str,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self._group = group
        self._name = name
        self._in_features = in_features
        self.weight = torch.empty(out_features, in_features.size, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def parameters(self, prefix: str) -> list[Parameter]:
        found = [Parameter(f"{prefix}.{self._name}.weight", self.weight, share=self._in_features, dim=1)]
        if self.bias is not None:
            found.append(Parameter(f"{prefix}.{self._name}.bias", self.bias))
        return found

    def pack(self) -> None:
        """Once filled: put the weight into the layout of the device."""
        self.weight = self._ops.pack(self.weight)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of x Wᵀ."""
        return self._ops.linear(x, self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._group.sum(self.partial(x))
        return y if self.bias is None else y + self.bias
