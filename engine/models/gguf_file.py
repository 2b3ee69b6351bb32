"""Reading a GGUF file's header: metadata and the directory of tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
`gguf.GGUFReader` makes a numpy array of every element, seconds and hundreds of megabytes for a
vocabulary, and runs without end on some damaged files; here every length is checked against the file.
"""

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.models.errors import ModelError
from engine.models.fields import Fields

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_SCALARS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor in its file. `shape` is in numpy's order, the fastest dimension last."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # bytes from the file's start
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any]  # int, float, bool, str or a list of those
    tensors: dict[str, GgufTensor]
    fingerprint: str  # sha256 of the header's bytes

    def read_floats(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Read a float32 tensor. Raises ModelError for another type."""
        tensor = self.tensors[name]
        if tensor.type != GGMLQuantizationType.F32:
            raise ModelError(f"{self.path}: tensor {name} must be F32, is {tensor.type.name}")
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            return np.frombuffer(file.read(tensor.num_bytes), np.float32).reshape(tensor.shape)


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor directory. Raises ModelError for a file that is not GGUF, damaged or truncated."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # includes mmap of an empty file and undecodable text
        raise ModelError(f"{path} is damaged: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    if data[:4] != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
    cursor = _Cursor(data, 4)
    version = cursor.scalar(GGUFValueType.UINT32)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
    num_tensors = cursor.scalar(GGUFValueType.UINT64)
    num_entries = cursor.scalar(GGUFValueType.UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar(GGUFValueType.UINT32))
    entries = [cursor.tensor_entry() for _ in range(num_tensors)]
    alignment = Fields(path, metadata).integer("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place(name, start, dims, kind, offset) for name, dims, kind, offset in entries}
    _check_end(path, tensors, len(data))
    return GgufHeader(path, metadata, tensors, hashlib.sha256(data[: cursor.position]).hexdigest())


def _place(name: str, start: int, dims: tuple[int, ...], type_code: int, offset: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(type_code)
    except ValueError:
        raise ValueError(f"tensor {name} has the unknown type {type_code}") from None
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    count = 1
    for dim in dims:
        count *= dim
    if not dims or dims[0] % block:
        raise ValueError(
            f"tensor {name} of {quantization.name} has shape {dims}; the first must be a multiple of {block}"
        )
    return GgufTensor(dims[::-1], quantization, start + offset, count // block * block_bytes)


def _check_end(path: Path, tensors: dict[str, GgufTensor], size: int) -> None:
    if not tensors:
        return
    name, last = max(tensors.items(), key=lambda item: item[1].offset + item[1].num_bytes)
    end = last.offset + last.num_bytes
    if end > size:
        raise ModelError(f"{path} is truncated: tensor {name} ends at byte {end}, the file at {size}")


class _Cursor:
    """Reads values one after the other. Raises ValueError when the file ends before them."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"its header runs past the end, byte {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, kind: int) -> Any:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise ValueError(f"metadata of the unknown type {kind} before byte {self.position}")
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self.scalar(kind)

    def _array(self) -> list[Any]:
        kind, count = struct.unpack("<IQ", self.take(12))
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return list(np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist())
        return [self.value(kind) for _ in range(count)]

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read (name, dimensions with the fastest first, type code, offset from the data's start)."""
        name = self.text()
        (num_dims,) = struct.unpack("<I", self.take(4))
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        type_code, offset = struct.unpack("<IQ", self.take(12))
        return name, dims, type_code, offset
