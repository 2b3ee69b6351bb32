"""Attention backends of CPU workers, by the names that --attention-backend takes: one line registers one."""

from collections.abc import Callable

from worker.cpu.attention import CpuAttention
from worker.cpu.reference_attention import ReferenceAttention
from worker.layers.attention import AttentionBackend, AttentionShape

MakeBackend = Callable[[AttentionShape, int], AttentionBackend]
"""Allocates KV memory for a shape, to be used by so many threads. Raises DeviceError for what it cannot compute."""


def _reference(shape: AttentionShape, threads: int) -> AttentionBackend:
    return ReferenceAttention(shape)


BACKENDS: dict[str, MakeBackend] = {  # the first is the default
    "numba": CpuAttention,
    "reference": _reference,
}
