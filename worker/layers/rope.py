"""Rotary position embedding (Su et al. 2021) and its context extensions, as tables of cos and sin."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch

from proto.model import RopeConfig
from worker.layers.attention import Rotation


class Rope:
    """Tables [max_position, head_dim/2] float32, looked up by absolute position."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position: int, rotary_dim: int = 0) -> None:
        """`max_position`: the length of the longest sequence that is served, which decides between LongRoPE's factors.

        With a `rotary_dim`, rotate that many dimensions of a head, where `pair_across_halves` puts them.
        """
        # For a model that is built on "meta", to read its shapes, these are tiny. There, arange would import all of
        # torch's compiler, which takes a second and leaves a directory behind.
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            cos, sin = tables(config, rotary_dim or head_dim, max_position)
        unmoved = (0, head_dim // 2 - cos.shape[1])
        self.cos = torch.nn.functional.pad(cos, unmoved, value=1.0)
        self.sin = torch.nn.functional.pad(sin, unmoved)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return what attention does to q and k of tokens at `positions` [T] int32."""
        return Rotation(positions, self.cos, self.sin)


def pair_across_halves(heads: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Reorder dimensions, heads [n, d, ...], so that the pairs (i, i + rotary_dim/2) stand d/2 apart.

    Kernels rotate i with i + d/2. Scores do not notice, as long as q and k have the same order.
    """
    half, rest = rotary_dim // 2, (heads.shape[1] - rotary_dim) // 2
    first, second, low, high = torch.split(heads, [half, half, rest, rest], dim=1)
    return torch.cat([first, low, second, high], dim=1)


def tables(config: RopeConfig, rotary_dim: int, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_position, rotary_dim/2] float32, scaled by the attention factor of YaRN or LongRoPE.

    Angles are rounded to float32 as Hugging Face's are; their cos and sin are exact to float32, whatever the
    length of the table. Raises ValueError for an unknown type.
    """
    if config.type not in _ANGLES:
        raise ValueError(f"rope type {config.type!r} is not one of {', '.join(_ANGLES)}")
    angles = _ANGLES[config.type](config, rotary_dim, torch.arange(max_position, dtype=torch.float32))
    factor = _ATTENTION_FACTORS[config.type](config) if config.type in _ATTENTION_FACTORS else 1.0
    exact = angles.double()
    return (exact.cos() * factor).float(), (exact.sin() * factor).float()


def _inverse_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """theta^(-2i/d), [d/2] float32."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def _default(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    return positions[:, None] * _inverse_frequencies(config.theta, head_dim)


def _linear(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023): all frequencies divided by the factor."""
    return positions[:, None] * (_inverse_frequencies(config.theta, head_dim) / config.factor)


def _dynamic(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Dynamic NTK: beyond the trained length the base grows with the length of the sequence.

    Which length is a matter of definition. Hugging Face takes that of the current call, so that a prompt's keys
    depend on how it was cut into calls. Here a position p is always rotated for a sequence of p + 1 tokens: a
    function of the position alone, which chunking and the prefix cache require. It equals Hugging Face for every
    position within the trained length, and beyond it for tokens that are fed one at a time (generation); it
    differs where Hugging Face prefills a prompt longer than the trained length in one call.
    """
    length = positions.double() + 1
    trained = config.original_max_position
    grown = (config.factor * length / trained) - (config.factor - 1)
    base = torch.where(length > trained, config.theta * grown ** (head_dim / (head_dim - 2)), config.theta)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return positions[:, None] * (1.0 / base[:, None] ** exponent).float()


def _llama3(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are divided by the factor, short ones kept, those between interpolated."""
    frequencies = _inverse_frequencies(config.theta, head_dim)
    wavelengths = 2 * math.pi / frequencies
    trained, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
    kept = (trained / wavelengths - low) / (high - low)  # 1 at the short end, 0 at the long end
    kept = kept.clamp(0, 1)
    return positions[:, None] * ((1 - kept) * frequencies / config.factor + kept * frequencies)


def _yarn(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023), "NTK by parts": interpolate dimensions that turn rarely over the trained length."""
    frequencies = _inverse_frequencies(config.theta, head_dim)

    def dimension(rotations: float) -> float:
        """Return the (fractional) dimension that turns this often over the trained length."""
        return (
            head_dim * math.log(config.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return positions[:, None] * (frequencies / config.factor * interpolated + frequencies * (1 - interpolated))


def _yarn_attention_factor(config: RopeConfig) -> float:
    """Factor on cos and sin, that is √ of the temperature on attention logits."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, by whether longer sequences than trained are served.

    transformers takes the long ones for calls beyond the trained length, and so rotates a sequence's first tokens
    anew when it grows across. Here, as in vLLM, the served length decides once, so that keys can be kept: equal to
    transformers for calls on the same side of the trained length.
    """
    long = len(positions) > config.original_max_position
    divisors = torch.tensor(config.long_factors if long else config.short_factors, dtype=torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return positions[:, None] * (1.0 / (divisors * config.theta**exponents))


def _longrope_attention_factor(config: RopeConfig) -> float:
    """Factor on cos and sin, for short sequences too."""
    if config.attention_factor is not None:
        return config.attention_factor
    return math.sqrt(1 + math.log(max(config.factor, 1.0)) / math.log(config.original_max_position))


_ANGLES: dict[str, Callable[[RopeConfig, int, torch.Tensor], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_ATTENTION_FACTORS: dict[str, Callable[[RopeConfig], float]] = {
    "yarn": _yarn_attention_factor,
    "longrope": _longrope_attention_factor,
}
