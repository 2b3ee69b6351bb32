"""Checkpoints of one or several safetensors files, through mmap."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from proto.division import Share
from worker.loader.checkpoint import TensorInfo
from worker.loader.errors import LoadError

FLOATING = ("F32", "BF16", "F16")


class SafetensorsCheckpoint:
    """See `Checkpoint`. Raises LoadError for a missing, cut or corrupt file, or a name found in two files."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        for file in files:
            self._open(file)

    def _open(self, file: str) -> None:
        if not Path(file).is_file():
            raise LoadError(f"{file}: no such file, though the model's index names it")
        try:
            # The library checks that the header fits the file's length.
            opened: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{file}: not a complete safetensors file: {error}") from error
        self._files[file] = opened
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if name in self.tensors:
                raise LoadError(f"{file}: tensor {name} is also in {self.tensors[name].file}")
            part = opened.get_slice(name)
            dtype = part.get_dtype()
            self.tensors[name] = TensorInfo(tuple(part.get_shape()), dtype, dtype in FLOATING, file)

    def read(self, name: str, share: Share | None = None, dim: int = 0) -> torch.Tensor:
        file = self.tensors[name].file
        try:
            if share is None or share.whole:
                tensor: torch.Tensor = self._files[file].get_tensor(name)
            else:
                part = slice(share.start, share.stop)
                tensor = self._files[file].get_slice(name)[part if dim == 0 else (slice(None), part)]
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{file}: tensor {name} cannot be read: {error}") from error
        return tensor
