"""Normalisation."""

import torch

from proto.division import Share
from worker.layers.module import Module, Target
from worker.layers.parameter import Parameter


class RMSNorm(Module):
    """Root mean square normalisation (Zhang & Sennrich 2019), over the last dimension.

    The product with the weight is taken in float32 and rounded once, where Hugging Face rounds to bfloat16
    before it: the same in float32, closer to the exact value in bfloat16.
    """

    def __init__(self, target: Target, size: int, eps: float, *, offset: float = 0.0) -> None:
        """`offset` is what Hugging Face's checkpoints of some families leave off the weight, then kept in float32."""
        dtype = torch.float32 if offset else target.dtype
        self.weight = Parameter(torch.empty(size, dtype=dtype), offset=offset)
        self.eps = eps
        self._ops = target.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size], returned in the same shape and dtype."""
        return self._ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight.tensor, self.eps).view(x.shape)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta (None = 0) and its norm, all [N, size]; x and delta must not be used again."""
        if delta is None:
            return x, self(x)
        return self._ops.add_rms_norm(x, delta, self.weight.tensor, self.eps)


class SharedRMSNorm(RMSNorm):
    """RMSNorm over features that ranks share: of the whole row, of which each rank keeps its share."""

    def __init__(self, target: Target, share: Share, eps: float) -> None:
        super().__init__(target, share.total, eps)
        self.share = share
        self._group = target.group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ..., d] of this rank's features, returned in the same shape and dtype."""
        row = self._group.gather(x.flatten(1).contiguous(), self.share)
        return super().__call__(row)[:, self.share.start : self.share.stop].view(x.shape)


class LayerNorm(Module):
    """Layer normalisation (Ba et al. 2016) with weight and bias, over the last dimension."""

    def __init__(self, target: Target, size: int, eps: float) -> None:
        self.weight = Parameter(torch.empty(size, dtype=target.dtype))
        self.bias = Parameter(torch.empty(size, dtype=target.dtype))
        self.eps = eps
        self._ops = target.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, size], returned in the same shape and dtype."""
        return self._ops.layer_norm(x, self.weight.tensor, self.bias.tensor, self.eps)
