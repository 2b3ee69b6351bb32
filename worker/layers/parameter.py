"""A weight that the loader fills."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from proto.division import Share


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint keeps a weight in few bits: value = (stored - zero) × scale, for each group of inputs."""

    bits: int
    group_size: int  # input features that share a scale; 0 = all of a row
    companions: dict[str, torch.Tensor]  # to be filled too: tensors beside the weight, as "scales", "qzeros", "g_idx"


@dataclass(slots=True, eq=False)
class Parameter:
    """This rank's part of a weight, which may merge several maps: those that `parts` names, one after another.

    A checkpoint may hold the maps as tensors of their own (Llama's q, k and v) or merged in this order (Phi-3's
    qkv); each rank has its share of every map in either case.
    """

    tensor: torch.Tensor
    parts: dict[str, Share] = field(default_factory=dict)  # along `dim`; {} = every rank holds the whole tensor
    dim: int = 0
    offset: float = 0.0  # added to what a Hugging Face checkpoint holds; GGUF files hold the sum
    quantization: Quantization | None = None  # None = the checkpoint holds plain numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape over all ranks, of all maps merged."""
        sizes = list(self.tensor.shape)
        if self.parts:
            sizes[self.dim] = sum(share.total for share in self.parts.values())
        return tuple(sizes)

    def slices(self) -> Iterator[tuple[str, Share, Share, torch.Tensor]]:
        """Yield for each map: its name, this rank's share of it, the same share counted in all maps merged, and
        the place in `tensor` that it fills."""
        total, before, start = sum(share.total for share in self.parts.values()), 0, 0
        for name, share in self.parts.items():
            merged = Share(before + share.start, share.size, total)
            yield name, share, merged, self.tensor.narrow(self.dim, start, share.size)
            before += share.total
            start += share.size

    def copy_from(self, whole: torch.Tensor) -> None:
        """Fill the tensor from one of `shape`."""
        if not self.parts:
            self.tensor.copy_(whole)
        for _, _, merged, place in self.slices():
            place.copy_(whole.narrow(self.dim, merged.start, merged.size))

    def release(self) -> torch.Tensor:
        """Hand the tensor over and keep an empty one, so that it can be freed as soon as a device has packed it."""
        tensor, self.tensor = self.tensor, self.tensor.new_empty(0)
        return tensor
