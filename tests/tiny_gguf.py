"""Small GGUF files, written by the `gguf` package: a Llama-like shape, tensors of zeros, and any tokenizer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 96

Metadata = dict[str, Any]


def metadata(architecture: str = "llama", **changes: Any) -> Metadata:
    """Keys of the architecture's own, without its name; a change to ... leaves one out. Double underscores are dots."""
    keys: Metadata = {
        "context_length": 1024,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {f"{architecture}.{key}": value for key, value in keys.items() if value is not ...}


def byte_level_tokens() -> Metadata:
    """A minimal tokenizer: the 256 bytes, one merge, one control token."""
    from engine.models.synthetic_tokenizer import byte_alphabet

    tokens = [*byte_alphabet(), "ab", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }


def tensors(vocab_size: int = 258, dtype: type[np.generic] = np.float16) -> dict[str, np.ndarray[Any, Any]]:
    """Enough of them to tell shape and dtype; the file is not for running."""
    return {
        "token_embd.weight": np.zeros((vocab_size, HIDDEN), dtype),
        "blk.0.attn_q.weight": np.zeros((HEADS * HEAD_DIM, HIDDEN), dtype),
        "blk.0.attn_norm.weight": np.zeros(HIDDEN, np.float32),
    }


def write(
    path: Path,
    keys: Metadata | None = None,
    tokenizer: Metadata | None = None,
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a file; what is not given is taken from above."""
    writer = gguf.GGUFWriter(path, architecture)
    everything = (metadata(architecture) if keys is None else keys) | (tokenizer or byte_level_tokens())
    for key, value in everything.items():
        _add(writer, key, value)
    for name, array in (tensors() if weights is None else weights).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
