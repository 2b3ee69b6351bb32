"""What each kind of device offers, as a table that can be read without starting one."""

from collections.abc import Callable
from dataclasses import dataclass

SIMULATED = "sim"


@dataclass(frozen=True, slots=True)
class Offer:
    """The choices of one kind of device, in addition to "auto"."""

    dtypes: tuple[str, ...]  # dtypes of weights and activations
    kv_cache_dtypes: tuple[str, ...]  # dtypes of K and V in memory; "auto" is that of the activations
    ranks: bool  # several workers may share a model


OFFERS: dict[str, Offer] = {
    "cpu": Offer(("bfloat16", "float32"), (), ranks=True),
    "reference": Offer(("bfloat16", "float32"), (), ranks=True),
    "cuda": Offer(("bfloat16", "float32", "float16"), ("fp8_e4m3",), ranks=True),
    SIMULATED: Offer(("bfloat16", "float32"), (), ranks=False),
}


def is_simulated(device: str) -> bool:
    """True for "sim:h200" or "sim:custom,flops=1e15,…"."""
    return device.startswith(f"{SIMULATED}:")


def refuse(device: str, *, dtype: str, kv_cache_dtype: str, tensor_parallel_size: int) -> str:
    """Say what such a device cannot do, naming the flag; "" = it can do all of this."""
    kind = SIMULATED if is_simulated(device) else device
    if kind not in OFFERS or device == SIMULATED:
        kinds = ", ".join(kind for kind in OFFERS if kind != SIMULATED)
        return f"--device must be one of {kinds}, sim:h200, sim:h100 and sim:custom,…; got {device!r}"
    offer = OFFERS[kind]
    if dtype not in ("auto", *offer.dtypes):
        return _lacking(f"--dtype {dtype}", device, lambda other: dtype in other.dtypes)
    if kv_cache_dtype not in ("auto", *offer.kv_cache_dtypes):
        return _lacking(
            f"--kv-cache-dtype {kv_cache_dtype}", device, lambda other: kv_cache_dtype in other.kv_cache_dtypes
        )
    if tensor_parallel_size > 1 and not offer.ranks:
        return _lacking(f"--tensor-parallel-size {tensor_parallel_size}", device, lambda other: other.ranks)
    return ""


def _lacking(flag: str, device: str, has: Callable[[Offer], bool]) -> str:
    having = [kind for kind, offer in OFFERS.items() if has(offer)]
    if not having:
        return f"{flag} is not available on any device"
    kinds = " or ".join(filter(None, (", ".join(having[:-1]), having[-1])))
    return f"{flag} needs --device {kinds}, got --device {device}"
