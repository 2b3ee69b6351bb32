"""Token embedding and the map back to the vocabulary, which ranks share by tokens."""

import torch

from worker.layers.gemm_shape import GemmShape
from worker.layers.module import Module, Target
from worker.layers.ops import Packed
from worker.layers.parameter import Parameter


class Embedding(Module):
    """Rows of a table [vocab, hidden]."""

    def __init__(self, target: Target, vocab_size: int, hidden_size: int) -> None:
        self.share = target.group.share_equally(vocab_size)
        self.weight = Parameter(torch.empty(self.share.size, hidden_size, dtype=target.dtype), {"": self.share})
        self._group = target.group

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] int → [N, hidden]."""
        if self.share.whole:
            return self.weight.tensor[ids]
        places = ids - self.share.start
        elsewhere = (places < 0) | (places >= self.share.size)
        rows = self.weight.tensor[places.masked_fill(elsewhere, 0)]
        return self._group.sum(rows.masked_fill(elsewhere.unsqueeze(1), 0))


class Head(Module):
    """Logits in float32, from a weight kept in float32.

    bfloat16 logits of a large vocabulary tie at the top (3 % of positions of a 135M model), and then greedy
    choice is luck. The float32 copy is exact, costs 4 bytes × vocab × hidden, and is about as fast on a CPU.
    """

    def __init__(self, target: Target, vocab_size: int, hidden_size: int, *, tied: Embedding | None) -> None:
        share = target.group.share_equally(vocab_size)
        self.out_features, self.in_features = share.size, hidden_size
        self.tied = tied is not None
        self.weight = (
            Parameter(torch.empty(share.size, hidden_size, dtype=target.dtype), {"": share})
            if tied is None
            else tied.weight
        )
        self.packed: Packed = None  # what `Ops.pack` makes of the weight in float32
        self._ops = target.ops
        self._group = target.group

    def pack(self) -> None:
        weight = self.weight.tensor if self.tied else self.weight.release()
        self.packed = self._ops.pack(weight.float())

    def gemm_shapes(self, tokens: int, sampled: int) -> list[GemmShape]:
        return [GemmShape(self.out_features, self.in_features, torch.float32, sampled)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, vocab] float32, all of it on every rank."""
        return self._group.concatenate(self._ops.linear(x.float(), self.packed))
