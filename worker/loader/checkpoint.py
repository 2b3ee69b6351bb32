"""The interface of a checkpoint to the loader, whatever its file format."""

from dataclasses import dataclass
from typing import Protocol

import torch

from proto.division import Share


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that a file holds."""

    shape: tuple[int, ...]
    dtype: str  # the format's own spelling
    floating: bool  # holds real numbers that can be read as float32 or bfloat16
    file: str


class Checkpoint(Protocol):
    """Tensors by name. Opening reads headers only; each tensor is read when asked for."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str, share: Share | None = None, dim: int = 0) -> torch.Tensor:
        """Read a tensor in the shape that `tensors` says, as float32, bfloat16 or float16. Raises LoadError.

        With a `share`, that part of it along `dim` (0 or 1), and no more of the file than holds it.
        """
