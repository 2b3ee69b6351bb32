"""Token embedding and the map back to the vocabulary, which ranks share by tokens."""

import torch

from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.ranks.group import Group


class Embedding:
    """Rows of a table [vocab, hidden]."""

    def __init__(self, group: Group, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self._group = group
        self._share = group.share_equally(vocab_size)
        self.weight = torch.empty(self._share.size, hidden_size, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}.weight", self.weight, share=self._share)]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] int → [N, hidden]."""
        if self._share.whole:
            return self.weight[ids]
        places = ids - self._share.start
        elsewhere = (places < 0) | (places >= self._share.size)
        rows = self.weight[places.masked_fill(elsewhere, 0)]
        return self._group.sum(rows.masked_fill(elsewhere.unsqueeze(1), 0))


class Head:
    """Logits in float32, from a weight kept in float32.

    bfloat16 logits of a large vocabulary tie at the top (3 % of positions of a 135M model), and then greedy
    choice is luck. The float32 copy is exact, costs 4 bytes × vocab × hidden, and is about as fast on a CPU.
    """

    def __init__(
        self, ops: Ops, group: Group, vocab_size: int, hidden_size: int, *, tied: bool, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._group = group
        self._share = group.share_equally(vocab_size)
        self.weight = None if tied else torch.empty(self._share.size, hidden_size, dtype=dtype)
        self._packed = torch.empty(0)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [] if self.weight is None else [Parameter(f"{prefix}.weight", self.weight, share=self._share)]

    def pack(self, embedding: torch.Tensor) -> None:
        """Take its own weight, or the embedding's [vocab, hidden] when tied; of a rank's share of tokens."""
        self._packed = self._ops.pack((embedding if self.weight is None else self.weight).float())
        self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, vocab] float32, all of it on every rank."""
        return self._group.concatenate(self._ops.linear(x.float(), self._packed))
