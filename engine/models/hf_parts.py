"""Readers of keys that the configs of several families share."""

from engine.models.fields import Fields

DTYPES = ("float32", "bfloat16", "float16")


def head_dim_of(config: Fields, absent: int) -> int:
    """Read `head_dim`, or take `absent`. Raises ModelError for an odd one, which rotary embeddings cannot halve."""
    head_dim = config.integer("head_dim", absent)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for rotary embeddings, is {head_dim}")
    return head_dim


def hidden_per_head(config: Fields, hidden_size: int, num_heads: int, *, heads_key: str = "num_attention_heads") -> int:
    if hidden_size % num_heads:
        raise config.error("hidden_size", f"{hidden_size} is not a multiple of {heads_key} {num_heads}")
    return hidden_size // num_heads


def kv_heads_of(config: Fields, num_heads: int, absent: int) -> int:
    """Read `num_key_value_heads`: `absent` if the key is absent, as many as heads if it is null."""
    kv_heads = config.integer("num_key_value_heads", num_heads if "num_key_value_heads" in config.values else absent)
    if num_heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {num_heads}")
    return kv_heads


def dtype_of(config: Fields, weights_dtype: str | None) -> str:
    """Return the checkpoint's dtype; `weights_dtype` is what the weight files hold, for configs that name none."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "auto").removeprefix("torch.")
    if name == "auto":
        return weights_dtype or "bfloat16"
    if name not in DTYPES:
        raise config.error(key, f"{name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def windows_of_types(config: Fields, window: int, num_layers: int, switch: str) -> tuple[int, ...]:
    """Return each layer's window by `layer_types`; `switch` names the keys that give `window`, 0 if they do not."""
    types = config.values["layer_types"]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"must list num_hidden_layers = {num_layers} types")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise config.error("layer_types", f"contains {unknown[0]!r}; supported: full_attention, sliding_attention")
    if "sliding_attention" in types and not window:
        raise config.error("layer_types", f"contains sliding_attention, but {switch} is off")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
