"""Finding safetensors files, and checking their headers, without reading any weights.

A file is 8 bytes of little-endian header length, a JSON header, and the tensors' bytes up to the end
(https://github.com/huggingface/safetensors#format). The loader checks names and shapes; here a
truncated or damaged file is found in milliseconds, before any stage starts.
"""

import os
from collections import Counter
from pathlib import Path

import msgspec

from engine.models.errors import ModelError
from engine.models.fields import read_json

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # bytes from the header's end


def find_weights(directory: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a Hugging Face directory, in load order. Raises ModelError."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if index.exists():
        return _shards(index)
    if single.exists():
        return (single,)
    others = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.safetensors"))
    found = f" (found {', '.join(others[:3])}, which is not supported)" if others else ""
    raise ModelError(f"{directory} holds neither {single.name} nor {index.name}{found}")


def _shards(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map names {name!r}, which is not a file beside it")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name} is missing; {index.name} names it")
    return tuple(index.parent / name for name in names)


def check_files(paths: tuple[Path, ...]) -> str | None:
    """Check each header against its file. Return the dtype of most values, if it is one that we read.

    Raises ModelError naming the file.
    """
    values: Counter[str] = Counter()
    for path in paths:
        try:
            values += _check(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return _DTYPES.get(values.most_common(1)[0][0]) if values else None


def _check(path: Path) -> Counter[str]:
    """Check one file. Returns the bytes of each dtype."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise ModelError(f"{path} is damaged: its {size} bytes cannot hold the header of {length} bytes it claims")
        header = file.read(length)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its header is not what safetensors writes: {error}") from error
    end = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if end != size:
        state = "is truncated" if size < end else "has trailing bytes"
        raise ModelError(f"{path} {state}: {size} bytes, its header describes {end}")
    counted: Counter[str] = Counter()
    for entry in entries.values():
        counted[entry.dtype] += entry.data_offsets[1] - entry.data_offsets[0]
    return counted
