"""How several ranks share one model: tensor parallelism after Megatron-LM (Shoeybi et al. 2019).

Each rank is a process that holds its share of attention heads, of MLPs' inner features and of the vocabulary. All
ranks run the same plans; whatever crosses between them goes through a `Group`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from proto.model import ModelConfig

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_FEATURES = 8


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of one dimension: `size` of `total` entries, from `start` on."""

    start: int
    size: int
    total: int
    copy: int = 0  # which of several copies of this part, where ranks share a part

    @property
    def whole(self) -> bool:
        return self.size == self.total

    @property
    def stop(self) -> int:
        return self.start + self.size

    def times(self, width: int) -> "Share":
        """The same part where each entry stands for `width` of them, as a head does for its features."""
        return Share(self.start * width, self.size * width, self.total * width, self.copy)


def whole(total: int) -> Share:
    """All of a dimension."""
    return Share(0, total, total)


class PeerLostError(Exception):
    """Another rank ended or fell silent in the middle of an exchange."""


class Group:
    """The ranks that share a model; this one is of a model that one rank holds alone, where nothing is exchanged.

    Every rank must call the same operations in the same order, with tensors of the same shape.
    `worker.ranks.distributed` has that of several processes, `worker.cuda.group` that of several GPUs. Operations
    raise PeerLostError.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def share(self, total: int) -> Share:
        """This rank's part of a dimension, as large as others' or 1 more or less. Raises ValueError for one of none."""
        if 0 < total < self.size:
            raise ValueError(f"{total} cannot be shared by {self.size} ranks")
        start, stop = self.rank * total // self.size, (self.rank + 1) * total // self.size
        return Share(start, stop - start, total)

    def share_features(self, total: int) -> Share:
        """As `share`, in multiples of 8 where the whole is one: kernels read 16 bytes of 16-bit numbers at once."""
        if total % _FEATURES or total // _FEATURES < self.size:
            return self.share(total)
        return self.share(total // _FEATURES).times(_FEATURES)

    def share_equally(self, total: int) -> Share:
        """As `share`, where ranks' results are put side by side (`concatenate`). Raises ValueError."""
        if total % self.size:
            raise ValueError(f"{total} cannot be divided between {self.size} ranks")
        return self.share(total)

    def share_heads(self, config: ModelConfig) -> tuple[Share, Share]:
        """This rank's query heads, and the KV heads that they read. Raises ValueError.

        Of fewer KV heads than ranks, each is copied to as many ranks.
        """
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if self.size <= kv_heads:
            part = self.share(kv_heads)
            return part.times(heads // kv_heads), part
        copies = self.size // kv_heads
        if self.size % kv_heads or heads % self.size:
            raise ValueError(f"{heads} heads on {kv_heads} KV heads cannot be shared by {self.size} ranks")
        return self.share(heads), Share(self.rank // copies, 1, kv_heads, self.rank % copies)

    def shape(self, config: ModelConfig) -> ModelConfig:
        """A model of the size that one rank holds: what its products, its attention and its KV memory look like."""
        heads, kv_heads = self.share_heads(config)
        return msgspec.structs.replace(
            config,
            vocab_size=self.share_equally(config.vocab_size).size,
            intermediate_size=self.share_features(config.intermediate_size).size,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            expert_size=self.share_features(config.expert_size).size,
        )

    def sum(self, x: "torch.Tensor") -> "torch.Tensor":
        """Σ of all ranks' x, the same bits on every rank, and under the law in each row whatever the other rows are.

        x may be overwritten.
        """
        return x

    def concatenate(self, x: "torch.Tensor") -> "torch.Tensor":
        """All ranks' x [N, part], side by side in the order of ranks: [N, size × part]."""
        return x

    def gather(self, x: "torch.Tensor", share: Share) -> "torch.Tensor":
        """All ranks' shares of each row, put together: x [N, size] → [N, total] on every rank, exactly as it was.

        Shares may be unequal or copied, unlike those of `concatenate`.
        """
        if share.whole:
            return x
        whole = x.new_zeros(x.shape[0], share.total)
        if not share.copy:
            whole[:, share.start : share.stop] = x
        return self.sum(whole)

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def agree(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank."""
        return find()

    def check_same(self, values: tuple[int, ...], what: str) -> None:
        """Raises RuntimeError when this rank's values are not those of rank 0; `what` names them."""

    def of_rank_0(self, x: "torch.Tensor") -> "torch.Tensor":
        """Rank 0's x on every rank; whatever is in others' x, which may be overwritten."""
        return x


ALONE = Group()
