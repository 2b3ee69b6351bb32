"""Gemma 2 and the text part of Gemma 3 → ModelConfig, with transformers' defaults, which Google's configs lean on."""

from engine.models.fields import Fields
from engine.models.hf_parts import dtype_of, head_dim_of, kv_heads_of, windows_of_types
from engine.models.hf_rope import nested, read_rope, rope_fields
from proto.model import ModelConfig, RopeConfig

_HEAD_DIM = 256  # where a config names none


def gemma2_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Read a config of Gemma 2. Raises ModelError naming file and key."""
    max_position = config.integer("max_position_embeddings", 8192)
    return _gemma(
        config,
        "gemma2",
        weights_dtype,
        vocab_size=256000,
        max_position=max_position,
        pattern=2,
        rope=read_rope(config, rope_fields(config), max_position, head_dim_of(config, _HEAD_DIM)),
        windowed_rope=None,
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Read a config of Gemma 3, or its text part beside a vision tower. Raises ModelError naming file and key."""
    if config.has("text_config"):
        text = nested(config, "text_config")
        shared = {key: config.values[key] for key in ("dtype", "torch_dtype") if config.has(key)}
        config = Fields(config.path, {**shared, **text.values}, "text_config.")
    max_position = config.integer("max_position_embeddings", 131072)
    rope, windowed_rope = _gemma3_ropes(config, max_position)
    if config.has("attn_logit_softcapping"):
        raise config.error("attn_logit_softcapping", "is not supported for Gemma 3, nor honoured by transformers")
    return _gemma(
        config,
        "gemma3",
        weights_dtype,
        vocab_size=262208,
        max_position=max_position,
        pattern=config.integer("sliding_window_pattern", 6),
        rope=rope,
        windowed_rope=windowed_rope,
        attention_soft_cap=0.0,
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", 0.0),
    )


def _gemma(
    config: Fields,
    family: str,
    weights_dtype: str | None,
    *,
    vocab_size: int,
    max_position: int,
    pattern: int,
    rope: RopeConfig,
    windowed_rope: RopeConfig | None,
    attention_soft_cap: float,
    logit_soft_cap: float,
) -> ModelConfig:
    """Read what both have in common. Every `pattern`th layer has no window, unless `layer_types` says otherwise."""
    if config.values.get("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "is not supported")
    num_heads, num_layers = config.integer("num_attention_heads", 8), config.integer("num_hidden_layers", 26)
    attention_bias = config.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size", vocab_size),
        hidden_size=config.integer("hidden_size", 2304),
        intermediate_size=config.integer("intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads_of(config, num_heads, 4),
        head_dim=head_dim_of(config, _HEAD_DIM),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        hidden_act=_activation(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=family == "gemma3",
        windows=_windows(config, num_layers, pattern),
        rope=rope,
        windowed_rope=windowed_rope,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=attention_soft_cap,
        logit_soft_cap=logit_soft_cap,
        dtype=dtype_of(config, weights_dtype),
    )


def _activation(config: Fields) -> str:
    name = config.text("hidden_activation", "gelu_pytorch_tanh")
    if name != "gelu_pytorch_tanh":
        raise config.error("hidden_activation", f"{name!r} is not supported; only gelu_pytorch_tanh is")
    return name


def _soft_cap(config: Fields, key: str, absent: float) -> float:
    """Read a cap; null turns it off, which is 0 in our config."""
    if config.has(key):
        return config.number(key)
    return 0.0 if key in config.values else absent


def _windows(config: Fields, num_layers: int, pattern: int) -> tuple[int, ...]:
    window = config.integer("sliding_window", 0 if "sliding_window" in config.values else 4096, minimum=0)
    if config.has("layer_types"):
        windows = windows_of_types(config, window, num_layers, "sliding_window")
    else:
        windows = tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    return windows if any(windows) else ()


def _gemma3_ropes(config: Fields, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the RoPE of layers without and with a window: an object each (transformers 5), or separate keys (4)."""
    theta, windowed_theta = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 10000.0)
    nothing = Fields(config.path, {})
    if config.has("rope_parameters"):
        both = nested(config, "rope_parameters")
        full, windowed = nested(both, "full_attention"), nested(both, "sliding_attention")
    else:
        full, windowed = nested(config, "rope_scaling"), nothing
    head_dim = head_dim_of(config, _HEAD_DIM)
    return (
        read_rope(nothing, full, max_position, head_dim, theta),
        read_rope(nothing, windowed, max_position, head_dim, windowed_theta),
    )
