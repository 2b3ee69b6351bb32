"""How ranks divide a model: tensor parallelism after Megatron-LM (Shoeybi et al. 2019).

Each rank holds its share of attention heads, of MLPs' inner features and of the vocabulary.
"""

from dataclasses import dataclass

import msgspec

from proto.model import ModelConfig

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
        """Return the same part where each entry stands for `width` of them, as a head does for its features."""
        return Share(self.start * width, self.size * width, self.total * width, self.copy)


def whole(total: int) -> Share:
    """Return all of a dimension."""
    return Share(0, total, total)


class Division:
    """What one of `size` ranks holds of a model. All methods raise ValueError for what cannot be divided."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def share(self, total: int) -> Share:
        """Return this rank's part of a dimension; parts differ by at most one entry, and none is empty."""
        if 0 < total < self.size:
            raise ValueError(f"{total} cannot be shared by {self.size} ranks")
        start, stop = self.rank * total // self.size, (self.rank + 1) * total // self.size
        return Share(start, stop - start, total)

    def share_features(self, total: int) -> Share:
        """Like `share`, in multiples of 8 where the whole is one: kernels read 16 bytes of 16-bit numbers at once."""
        if total % _FEATURES or total // _FEATURES < self.size:
            return self.share(total)
        return self.share(total // _FEATURES).times(_FEATURES)

    def share_equally(self, total: int) -> Share:
        """Like `share`, with parts of equal size, whose results can be concatenated."""
        if total % self.size:
            raise ValueError(f"{total} cannot be divided between {self.size} ranks")
        return self.share(total)

    def share_heads(self, config: ModelConfig) -> tuple[Share, Share]:
        """Return this rank's query heads and the KV heads that they read.

        Where ranks outnumber KV heads, each KV head is copied to equally many ranks.
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
        """Return a model of the size that one rank holds: its products, its attention and its KV memory."""
        heads, kv_heads = self.share_heads(config)
        return msgspec.structs.replace(
            config,
            vocab_size=self.share_equally(config.vocab_size).size,
            intermediate_size=self.share_features(config.intermediate_size).size,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            expert_size=self.share_features(config.expert_size).size,
        )
