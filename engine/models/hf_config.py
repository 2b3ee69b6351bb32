"""Hugging Face's config.json → ModelConfig.

Covers the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`), with transformers' defaults. What it cannot honour, it refuses.
"""

from typing import get_args

from engine.models.errors import ModelError
from engine.models.fields import Fields
from proto.model import ModelConfig, RopeConfig, RopeType

DTYPES = ("float32", "bfloat16", "float16")
_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as many as heads
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "finetuned",  # a remark, changes nothing
}


def model_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Read a decoder's shape. `weights_dtype` is what the weight files hold, for configs that name none.

    Raises ModelError naming file and key.
    """
    family = _family(config)
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set: quantised Hugging Face checkpoints are not supported yet")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    attention_bias = family in ("llama", "qwen3") and config.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, family, num_heads),
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        hidden_act=_activation(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and config.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        windows=_windows(config, family, num_layers),
        rope=_rope(config, max_position),
        dtype=_dtype(config, weights_dtype),
    )


def _family(config: Fields) -> str:
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise config.error("architectures", f"must name one architecture, is {architectures!r}")
    family = _FAMILIES.get(architectures[0])
    if family is None:
        raise config.error("architectures", f"names {architectures[0]}; supported: {', '.join(_FAMILIES)}")
    return family


def _head_dim(config: Fields, family: str, hidden_size: int, num_heads: int) -> int:
    if config.has("head_dim"):
        head_dim = config.integer("head_dim")
    elif family == "qwen3":
        head_dim = 128
    elif hidden_size % num_heads:
        raise config.error("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for rotary embeddings, is {head_dim}")
    return head_dim


def _kv_heads(config: Fields, family: str, num_heads: int) -> int:
    absent = num_heads if "num_key_value_heads" in config.values else _DEFAULT_KV_HEADS.get(family, num_heads)
    kv_heads = config.integer("num_key_value_heads", absent)
    if num_heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {num_heads}")
    return kv_heads


def _activation(config: Fields) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise config.error("hidden_act", f"{name!r} is not supported; only silu is")
    return "silu"


def _dtype(config: Fields, weights_dtype: str | None) -> str:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "auto").removeprefix("torch.")
    if name == "auto":
        return weights_dtype or "bfloat16"
    if name not in DTYPES:
        raise config.error(key, f"{name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _windows(config: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Window of each layer in positions, 0 = all; () when no layer has one."""
    if family == "llama":
        return ()
    if family == "mistral":
        absent = 0 if "sliding_window" in config.values else 4096
        window = config.integer("sliding_window", absent, minimum=0)
        return (window,) * num_layers if window else ()
    used = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if used and config.values.get("sliding_window", 4096) else 0
    if config.has("layer_types"):
        windows = _windows_of_types(config, window, num_layers)
    else:
        first = config.integer("max_window_layers", 28, minimum=0)
        windows = tuple(window if layer >= first else 0 for layer in range(num_layers))
    return windows if any(windows) else ()


def _windows_of_types(config: Fields, window: int, num_layers: int) -> tuple[int, ...]:
    types = config.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"must list num_hidden_layers = {num_layers} types")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise config.error("layer_types", f"contains {unknown[0]!r}; supported: full_attention, sliding_attention")
    if "sliding_attention" in types and not window:
        raise config.error("layer_types", "contains sliding_attention, but use_sliding_window/sliding_window is off")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _rope(config: Fields, max_position: int) -> RopeConfig:
    """Read rotary parameters; defaults as transformers' modeling_rope_utils."""
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, f"must be an object, is {values!r}")
    rope = Fields(config.path, values, f"{key}.")
    unknown = [k for k in values if k not in _ROPE_KEYS and values[k] is not None]
    if unknown:
        raise rope.error(unknown[0], "is not supported")
    if (rope if rope.has("partial_rotary_factor") else config).number("partial_rotary_factor", 1.0) != 1.0:
        raise config.error("partial_rotary_factor", "other than 1 is not supported")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 10000.0)
    rope_type = _rope_type(rope)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if rope_type == "linear":
        return RopeConfig(type="linear", theta=theta, factor=factor)
    if rope_type == "dynamic":
        # transformers grows the base from max_position_embeddings on, whatever else is written.
        return RopeConfig(type="dynamic", theta=theta, factor=factor, original_max_position=max_position)
    original = _original_max_position(config, rope, max_position)
    if rope_type == "llama3":
        return _llama3(rope, theta, factor, original)
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _rope_type(rope: Fields) -> RopeType:
    key = "rope_type" if rope.has("rope_type") else "type"
    name = rope.text(key, "default")
    for known in get_args(RopeType):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise rope.error(key, f"{name!r} is not supported; supported: {', '.join(get_args(RopeType))}")


def _original_max_position(config: Fields, rope: Fields, max_position: int) -> int:
    source = config if config.has("original_max_position_embeddings") else rope
    return source.integer("original_max_position_embeddings", max_position)


def _llama3(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must exceed low_freq_factor {low:g}, is {high:g}")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def check_ids(path: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises ModelError when an end id lies outside the vocabulary."""
    for token_id in ids:
        if token_id >= vocab_size:
            raise ModelError(f"{path}: end-of-text id {token_id} is outside the vocabulary of {vocab_size}")
