"""What GGUF files of Gemma 2 and 3 say beyond a Llama's, and what llama.cpp knows without their saying so."""

from typing import Any

from engine.models.fields import Fields
from proto.model import RopeConfig

_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models
_PERIOD = {"gemma2": 2, "gemma3": 6}  # of layers, the last of which has no window
_WINDOW = {"gemma2": 4096, "gemma3": 0}
_WINDOWED_THETA = 10000.0


def gemma_fields(
    keys: Fields, architecture: str, *, hidden_size: int, num_heads: int, head_dim: int, num_layers: int
) -> dict[str, Any]:
    """Fields of ModelConfig. Raises ModelError naming file and key.

    The scale of attention stands in no key: it is 1/√head_dim, but 1/√(hidden/heads) in both 27B models, which
    are told by their number of layers.
    """
    largest = num_layers == _LARGEST[architecture]
    window = keys.integer("attention.sliding_window", _WINDOW[architecture], minimum=0)
    windowed = _windowed_layers(keys, architecture, num_layers)
    windowed_rope = None
    if architecture == "gemma3" or keys.has("rope.freq_base_swa"):
        windowed_rope = RopeConfig(theta=keys.number("rope.freq_base_swa", _WINDOWED_THETA))
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "windows": tuple(window if layer else 0 for layer in windowed) if window and any(windowed) else (),
        "windowed_rope": windowed_rope,
        "attention_scale": (hidden_size // num_heads if largest else head_dim) ** -0.5,
        "attention_soft_cap": _soft_cap(keys, "attn_logit_softcapping", 50.0 if architecture == "gemma2" else 0.0),
        "logit_soft_cap": _soft_cap(keys, "final_logit_softcapping", 30.0 if architecture == "gemma2" else 0.0),
    }


def _windowed_layers(keys: Fields, architecture: str, num_layers: int) -> list[bool]:
    """By a period, or layer by layer."""
    pattern = keys.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise keys.error("attention.sliding_window_pattern", f"must list block_count = {num_layers} layers")
        return [bool(layer) for layer in pattern]
    period = keys.integer("attention.sliding_window_pattern", _PERIOD[architecture])
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _soft_cap(keys: Fields, key: str, absent: float) -> float:
    """A cap; 0 turns it off."""
    if not keys.has(key):
        return absent
    return keys.number(key) if keys.values[key] != 0 else 0.0
