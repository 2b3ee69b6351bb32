"""GGUF metadata → ModelConfig. Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import math
from collections import Counter
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from engine.models.fields import Fields
from engine.models.gguf_file import GgufHeader
from proto.model import ModelConfig, RopeConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_CONTEXT = 8192  # what Llama 3 was trained on, before 3.1 extended it
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0

# What llama.cpp knows of Gemma without the file saying so
_GEMMA_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models
_GEMMA_PERIOD = {"gemma2": 2, "gemma3": 6}  # in layers; the last of each period has no window
_GEMMA_WINDOW = {"gemma2": 4096, "gemma3": 0}
_GEMMA_WINDOWED_THETA = 10000.0


def gguf_config(header: GgufHeader) -> ModelConfig:
    """Read a decoder's shape. Raises ModelError naming file and key.

    The dtype is that of most weights; quantised ones, which are dequantised at load, count as bfloat16.
    """
    general = Fields(header.path, header.metadata)
    architecture = general.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise general.error(
            "general.architecture", f"{architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    if general.integer("split.count", 1, minimum=0) > 1:
        raise general.error("split.count", "says that this is one part of several; merge them into one file first")
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): _uniform(v) for k, v in header.metadata.items() if k.startswith(prefix)}
    keys = Fields(header.path, own, prefix)
    if keys.integer("expert_count", 0, minimum=0):
        raise keys.error("expert_count", "is set: mixtures of experts are not supported yet")
    vocab_size, hidden_size = _embedding_shape(header, keys)
    num_heads, num_layers = keys.integer("attention.head_count"), keys.integer("block_count")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"{num_kv_heads} does not divide attention.head_count {num_heads}")
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    own_fields: dict[str, Any] = {"windows": (window,) * num_layers if window else ()}
    if architecture in ("gemma2", "gemma3"):
        own_fields = _gemma_fields(
            keys,
            architecture,
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            num_layers=num_layers,
        )
    return ModelConfig(
        family="mistral" if window and architecture == "llama" else architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        out_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        rope=_rope(header, keys, head_dim),
        dtype=_dtype(header),
        **own_fields,
    )


def _uniform(value: Any) -> Any:
    """Reduce a per-layer list of one repeated value to that value; getters refuse other lists."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _embedding_shape(header: GgufHeader, keys: Fields) -> tuple[int, int]:
    hidden_size = keys.integer("embedding_length")
    tensor = header.tensors.get("token_embd.weight")
    if tensor is None:
        raise Fields(header.path, {}).error("token_embd.weight", "is missing among its tensors")
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size:
        raise keys.error("embedding_length", f"{hidden_size} does not fit token_embd.weight of shape {tensor.shape}")
    return tensor.shape[0], hidden_size


def _head_dim(keys: Fields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads and not keys.has("attention.key_length"):
        raise keys.error("embedding_length", f"{hidden_size} is not a multiple of attention.head_count {num_heads}")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(key, f"{keys.integer(key)} other than the head's {head_dim} is not supported")
    return head_dim


def _dtype(header: GgufHeader) -> str:
    sizes: Counter[GGMLQuantizationType] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.type] += math.prod(tensor.shape)
    return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")


def _rope(header: GgufHeader, keys: Fields, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    if _ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise keys.error("rope.scaling.type", f"{kind!r} together with tensor {_ROPE_FACTORS} is not supported")
        return _llama3(header, keys, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
        return RopeConfig(type="linear", theta=theta, factor=factor)
    if kind != "yarn":
        raise keys.error("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn")
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if keys.has(f"rope.scaling.{key}") and keys.values[f"rope.scaling.{key}"] != neutral:
            raise keys.error(f"rope.scaling.{key}", f"other than {neutral:g} is not supported")
    factor = keys.number("rope.scaling.factor")
    scale = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position=keys.integer("rope.scaling.original_context_length"),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        # llama.cpp multiplies the paper's factor by this one.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def _llama3(header: GgufHeader, keys: Fields, theta: float, head_dim: int) -> RopeConfig:
    """Recover Llama 3's parameters from the divisors of frequencies that converters write instead of them.

    The factor is the largest divisor; the bounds are those of every published Llama 3, which is checked.
    """
    divisors = header.read_floats(_ROPE_FACTORS)
    rope = RopeConfig(
        type="llama3",
        theta=theta,
        factor=float(divisors.max()),
        original_max_position=keys.integer("rope.scaling.original_context_length", _LLAMA3_CONTEXT),
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
    expected = _llama3_divisors(rope, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise Fields(header.path, {}).error(
            f"tensor {_ROPE_FACTORS}",
            f"does not hold the divisors of Llama 3's scaling with factor {rope.factor:g} from "
            f"{rope.original_max_position} positions; others are not supported",
        )
    return rope


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the divisor of each of the head_dim / 2 frequencies in Llama 3.1's scaling."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_max_position * frequencies / (2 * np.pi)  # within the trained context
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
    return divisors


def _gemma_fields(
    keys: Fields, architecture: str, *, hidden_size: int, num_heads: int, head_dim: int, num_layers: int
) -> dict[str, Any]:
    """Return the fields of ModelConfig that only Gemma sets. Raises ModelError naming file and key.

    No key holds the attention scale: it is 1/√head_dim, except 1/√(hidden/heads) in both 27B models, which are
    recognised by their number of layers.
    """
    largest = num_layers == _GEMMA_LARGEST[architecture]
    window = keys.integer("attention.sliding_window", _GEMMA_WINDOW[architecture], minimum=0)
    windowed = _windowed_layers(keys, architecture, num_layers)
    windowed_rope = None
    if architecture == "gemma3" or keys.has("rope.freq_base_swa"):
        windowed_rope = RopeConfig(theta=keys.number("rope.freq_base_swa", _GEMMA_WINDOWED_THETA))
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "windows": tuple(window if layer else 0 for layer in windowed) if window and any(windowed) else (),
        "windowed_rope": windowed_rope,
        "attention_scale": (hidden_size // num_heads if largest else head_dim) ** -0.5,
        "attention_soft_cap": _soft_cap(keys, "attn_logit_softcapping", 50.0 if architecture == "gemma2" else 0.0),
        "logit_soft_cap": _soft_cap(keys, "final_logit_softcapping", 30.0 if architecture == "gemma2" else 0.0),
    }


def _windowed_layers(keys: Fields, architecture: str, num_layers: int) -> list[bool]:
    """Return which layers have a window, given as a period or layer by layer."""
    pattern = keys.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise keys.error("attention.sliding_window_pattern", f"must list block_count = {num_layers} layers")
        return [bool(layer) for layer in pattern]
    period = keys.integer("attention.sliding_window_pattern", _GEMMA_PERIOD[architecture])
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _soft_cap(keys: Fields, key: str, absent: float) -> float:
    """Read a cap; 0 turns it off."""
    if not keys.has(key):
        return absent
    return keys.number(key) if keys.values[key] != 0 else 0.0
