"""Checkpoints in one GGUF file, dequantised tensor by tensor."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from proto.division import Share, whole
from worker.loader.checkpoint import TensorInfo
from worker.loader.errors import LoadError

Type = gguf.GGMLQuantizationType
SUPPORTED = {
    *(Type.F32, Type.F16, Type.BF16),
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
}


class GgufCheckpoint:
    """See `Checkpoint`. Raises LoadError for a missing, cut or corrupt file."""

    def __init__(self, files: tuple[str, ...], num_heads: int, num_kv_heads: int) -> None:
        (self._file,) = files
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        reader = self._open()
        architecture = reader.fields["general.architecture"].contents() if reader.fields else ""
        self._permuted = architecture == "llama"
        self._data = {tensor.name: tensor for tensor in reader.tensors}
        if len(self._data) != len(reader.tensors):
            raise LoadError(f"{self._file}: a tensor name occurs twice")
        self.tensors = {
            name: TensorInfo(
                tuple(int(n) for n in reversed(tensor.shape)),
                tensor.tensor_type.name,
                tensor.tensor_type in SUPPORTED,
                self._file,
            )
            for name, tensor in self._data.items()
        }

    def _open(self) -> Any:
        if not Path(self._file).is_file():
            raise LoadError(f"{self._file}: no such file")
        try:
            return gguf.GGUFReader(self._file)
        except Exception as error:  # the package checks little, so a corrupt header may raise anything
            raise LoadError(f"{self._file}: not a complete GGUF file: {type(error).__name__}: {error}") from error

    def read(self, name: str, share: Share | None = None, dim: int = 0) -> torch.Tensor:
        tensor, shape = self._data[name], self.tensors[name].shape
        if share is None:
            share = whole(shape[dim])
        try:
            if dim == 0:
                values = _dequantized(tensor.data[share.start : share.stop], tensor.tensor_type)
            else:
                values = _columns(tensor.data, tensor.tensor_type, share)
            values = values.reshape([share.size if at == dim else size for at, size in enumerate(shape)])
        except Exception as error:
            raise LoadError(f"{self._file}: tensor {name} cannot be read: {type(error).__name__}: {error}") from error
        part = name.split(".")[-2]
        if self._permuted and part in self._heads:
            # Ranks share whole heads.
            values = unpermute(values, self._heads[part] * share.size // share.total if dim == 0 else self._heads[part])
        return torch.from_numpy(np.array(values, order="C", copy=not values.flags.writeable))


def _dequantized(data: np.ndarray[Any, Any], kind: Type) -> np.ndarray[Any, Any]:
    return dequantize(data, kind).astype(np.float32, copy=False)


def _columns(data: np.ndarray[Any, Any], kind: Type, share: Share) -> np.ndarray[Any, Any]:
    """Read columns of a matrix whose rows are quantised in blocks: dequantise the blocks that hold them, and cut."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    per_block = block_bytes if data.dtype == np.uint8 else block  # entries of `data`: bytes, or the numbers themselves
    first, last = share.start // block, -(-share.stop // block)
    values = _dequantized(np.ascontiguousarray(data[:, first * per_block : last * per_block]), kind)
    return np.ascontiguousarray(values[:, share.start - first * block : share.stop - first * block])


def unpermute(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's reordering of q and k rows [heads × d, ...] in files of architecture llama.

    Its converter interleaves the two halves of each head, for a RoPE that rotates neighbouring dimensions;
    ours rotates dimension i with i + d/2, as Hugging Face's does.
    """
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
