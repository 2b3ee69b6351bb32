"""Token embedding and the map back to the vocabulary."""

import torch

from worker.layers.ops import Ops
from worker.layers.parameter import Parameter


class Embedding:
    """Rows of a table [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [Parameter(f"{prefix}.weight", self.weight)]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] int → [N, hidden]."""
        return self.weight[ids]


class Head:
    """Logits in float32, from a weight kept in float32.

    bfloat16 logits of a large vocabulary tie at the top (3 % of positions of a 135M model), and then greedy
    choice is luck. The float32 copy is exact, costs 4 bytes × vocab × hidden, and is about as fast on a CPU.
    """

    def __init__(self, ops: Ops, vocab_size: int, hidden_size: int, *, tied: bool, dtype: torch.dtype) -> None:
        self._ops = ops
        self.weight = None if tied else torch.empty(vocab_size, hidden_size, dtype=dtype)
        self._packed = torch.empty(0)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [] if self.weight is None else [Parameter(f"{prefix}.weight", self.weight)]

    def pack(self, embedding: torch.Tensor) -> None:
        """Take its own weight, or the embedding's [vocab, hidden] when tied."""
        self._packed = self._ops.pack((embedding if self.weight is None else self.weight).float())
        self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] → [N, vocab] float32."""
        return self._ops.linear(x.float(), self._packed)
