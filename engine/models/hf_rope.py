"""Rotary parameters of Hugging Face's configs → RopeConfig; defaults as transformers' modeling_rope_utils."""

from typing import get_args

from engine.models.fields import Fields
from proto.model import RopeConfig, RopeType

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
    "short_factor",
    "long_factor",
    "finetuned",  # a remark, changes nothing
}


def rope_fields(config: Fields) -> Fields:
    """Return the config's rotary parameters: `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    return nested(config, key)


def nested(config: Fields, key: str) -> Fields:
    """Return the object under `key`, empty if there is none."""
    values = config.values.get(key) or {}
    if not isinstance(values, dict):
        raise config.error(key, f"must be an object, is {values!r}")
    return Fields(config.path, values, f"{key}.")


def read_rotary_dim(config: Fields, rope: Fields, head_dim: int, *, partial: bool) -> int:
    """Return how many dimensions of a head rotate: all of them, unless the family supports `partial` rotation.

    The factor is in `rope` or in `config` itself. Raises ModelError.
    """
    place = rope if rope.has("partial_rotary_factor") else config
    factor = place.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * factor)
    if factor != 1.0 and not partial:
        raise place.error("partial_rotary_factor", "other than 1 is not supported for this architecture")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise place.error(
            "partial_rotary_factor", f"{factor:g} of {head_dim} dimensions is {rotary_dim}, which must be even"
        )
    return rotary_dim


def read_rope(
    config: Fields,
    rope: Fields,
    max_position: int,
    head_dim: int,
    default_theta: float = 10000.0,
    *,
    partial: bool = False,
) -> RopeConfig:
    """Read `rope`; the base may also be in `config` itself. Raises ModelError."""
    unknown = [key for key in rope.values if key not in _ROPE_KEYS and rope.has(key)]
    if unknown:
        raise rope.error(unknown[0], "is not supported")
    rotary_dim = read_rotary_dim(config, rope, head_dim, partial=partial)
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", default_theta)
    rope_type = _rope_type(rope)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "longrope":
        return _longrope(config, rope, theta, max_position, rotary_dim)
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


def _longrope(config: Fields, rope: Fields, theta: float, max_position: int, rotary_dim: int) -> RopeConfig:
    place = config if config.has("original_max_position_embeddings") else rope
    original = place.integer("original_max_position_embeddings", minimum=2)
    return RopeConfig(
        type="longrope",
        theta=theta,
        factor=rope.number("factor", max_position / original),
        original_max_position=original,
        attention_factor=rope.optional_number("attention_factor"),
        short_factors=rope.numbers("short_factor", rotary_dim // 2),
        long_factors=rope.numbers("long_factor", rotary_dim // 2),
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
