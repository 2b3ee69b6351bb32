"""Llama and the families that differ from it by flags, dense or with mixtures of experts → ModelConfig."""

from typing import Any

from engine.models.fields import Fields
from engine.models.hf_parts import dtype_of, head_dim_of, hidden_per_head, kv_heads_of, windows_of_types
from engine.models.hf_rope import read_rope, read_rotary_dim, rope_fields
from proto.model import ModelConfig

# transformers' defaults, where they are not Llama's: as many KV heads as heads, 1e-6, 10000
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "mixtral": 8, "qwen3_moe": 4}
_NORM_EPS = {"mixtral": 1e-5, "phi3": 1e-5, "olmo2": 1e-5}
_BIASED = ("llama", "qwen3", "qwen3_moe", "olmo2", "granite")  # by attention_bias
_ROPE_THETA = {"mixtral": 1e6}


def llama_config(config: Fields, family: str, weights_dtype: str | None) -> ModelConfig:
    """Read a config of `family`. Raises ModelError naming file and key."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    max_position = config.integer("max_position_embeddings")
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    attention_bias = family in _BIASED and config.flag("attention_bias", False)
    rope = _rope(config, family)
    partial, theta = family == "phi3", _ROPE_THETA.get(family, 10000.0)
    rotary_dim = read_rotary_dim(config, rope, head_dim, partial=partial)
    return ModelConfig(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads_of(config, num_heads, _KV_HEADS.get(family, num_heads)),
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", _NORM_EPS.get(family, 1e-6)),
        max_position_embeddings=max_position,
        hidden_act=_activation(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family in ("llama", "granite") and config.flag("mlp_bias", False),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        wide_qk_norm=family == "olmo2",
        windows=_windows(config, family, num_layers),
        rope=read_rope(config, rope, max_position, head_dim, theta, partial=partial),
        rotary_dim=0 if rotary_dim == head_dim else rotary_dim,
        dtype=dtype_of(config, weights_dtype),
        **_mixture(config, family, num_layers),
        **_multipliers(config, family),
    )


def _head_dim(config: Fields, family: str, hidden_size: int, num_heads: int) -> int:
    if config.has("head_dim"):
        return head_dim_of(config, 0)
    return head_dim_of(config, 128 if family == "qwen3" else hidden_per_head(config, hidden_size, num_heads))


def _rope(config: Fields, family: str) -> Fields:
    """Return the rotary parameters, renaming "su" and "yarn" of Phi-3's first configs, which both meant LongRoPE."""
    rope = rope_fields(config)
    if family == "phi3":
        renamed = {key: "longrope" for key in ("type", "rope_type") if rope.values.get(key) in ("su", "yarn")}
        return Fields(rope.path, {**rope.values, **renamed}, rope.prefix)
    return rope


def _activation(config: Fields) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise config.error("hidden_act", f"{name!r} is not supported; only silu is")
    return "silu"


def _windows(config: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Return each layer's window in positions, 0 = all; () if no layer has one."""
    if family in ("llama", "olmo2", "granite"):
        return ()
    if family in ("mistral", "mixtral", "phi3"):
        absent = 4096 if family == "mistral" and "sliding_window" not in config.values else 0
        window = config.integer("sliding_window", absent, minimum=0)
        return (window,) * num_layers if window else ()
    used = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if used and config.values.get("sliding_window", 4096) else 0
    if family == "qwen3_moe":
        windows = (window,) * num_layers
    elif config.has("layer_types"):
        windows = windows_of_types(config, window, num_layers, "use_sliding_window/sliding_window")
    else:
        first = config.integer("max_window_layers", 28, minimum=0)
        windows = tuple(window if layer >= first else 0 for layer in range(num_layers))
    return windows if any(windows) else ()


def _mixture(config: Fields, family: str, num_layers: int) -> dict[str, Any]:
    """Return the fields of ModelConfig that describe experts, and say which layers have them."""
    if family == "mixtral":
        return {
            **_experts(config, "num_local_experts", 8, 2),
            "expert_size": config.integer("intermediate_size"),
            "renormalise_experts": True,
        }
    if family == "qwen3_moe":
        renamed = config.has("num_local_experts") and not config.has("num_experts")
        return {
            **_experts(config, "num_local_experts" if renamed else "num_experts", 128, 8),
            "expert_size": config.integer("moe_intermediate_size", 768),
            "renormalise_experts": config.flag("norm_topk_prob", False),
            "dense_layers": _dense_layers(config, num_layers),
        }
    return {}


def _multipliers(config: Fields, family: str) -> dict[str, Any]:
    if family != "granite":
        return {}
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logit_divisor": config.number("logits_scaling", 1.0),
    }


def _experts(config: Fields, key: str, absent: int, absent_per_token: int) -> dict[str, int]:
    num_experts, per_token = config.integer(key, absent), config.integer("num_experts_per_tok", absent_per_token)
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", f"{per_token} exceeds {key} {num_experts}")
    return {"num_experts": num_experts, "experts_per_token": per_token}


def _dense_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers named in `mlp_only_layers`, and those that `decoder_sparse_step` leaves out."""
    named, step = config.ids("mlp_only_layers"), config.integer("decoder_sparse_step", 1)
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
