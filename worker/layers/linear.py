"""Linear maps, alone or several merged into one product."""

import torch

from worker.layers.ops import Ops
from worker.layers.parameter import Parameter


class Linear:
    """y = x Wᵀ + b, for one map or for several that share their input, merged by rows of W."""

    def __init__(
        self, ops: Ops, in_features: int, parts: dict[str, int], *, bias: bool = False, dtype: torch.dtype
    ) -> None:
        """`parts`: name of each map and its output features, in the order of the output's columns."""
        self._ops = ops
        self._parts = parts
        out_features = sum(parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def parameters(self, prefix: str) -> list[Parameter]:
        found = []
        start = 0
        for name, size in self._parts.items():
            rows = slice(start, start + size)
            found.append(Parameter(f"{prefix}.{name}.weight", self.weight[rows]))
            if self.bias is not None:
                found.append(Parameter(f"{prefix}.{name}.bias", self.bias[rows]))
            start += size
        return found

    def pack(self) -> None:
        """Once filled: put the weight into the layout of the device."""
        self.weight = self._ops.pack(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ops.linear(x, self.weight)
        return y if self.bias is None else y + self.bias
