"""Normalisation."""

import torch

from worker.layers.ops import Ops
from worker.layers.parameter import Parameter


class RMSNorm:
    """Root mean square normalisation (Zhang & Sennrich 2019), over the last dimension.

    The product with the weight is taken in float32 and rounded once, where Hugging Face rounds to bfloat16
    before it: the same in float32, closer to the exact value in bfloat16.
    """

    def __init__(self, ops: Ops, size: int, eps: float, *, offset: float = 0.0, dtype: torch.dtype) -> None:
        """`offset` is what Hugging Face's checkpoints of some families leave off the weight, then kept in float32."""
        self._ops = ops
        self.weight = torch.empty(size, dtype=torch.float32 if offset else dtype)
        self.eps = eps
        self._offset = offset

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}.weight", self.weight, self._offset)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], returned in the same shape and dtype."""
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta (None = 0) and its norm, all [N, size]; x and delta must not be used again."""
        if delta is None:
            return x, self(x)
        return self._ops.add_rms_norm(x, delta, self.weight, self.eps)


class LayerNorm:
    """Layer normalisation (Ba et al. 2016) with weight and bias, over the last dimension."""

    def __init__(self, ops: Ops, size: int, eps: float, *, dtype: torch.dtype) -> None:
        self._ops = ops
        self.weight = torch.empty(size, dtype=dtype)
        self.bias = torch.empty(size, dtype=dtype)
        self.eps = eps

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}.weight", self.weight), Parameter(f"{prefix}.bias", self.bias)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, size], returned in the same shape and dtype."""
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)
