"""The KV pages that a GPU has room for, by what was measured on it."""

from dataclasses import dataclass

import torch

from proto.cache import CacheGroups
from proto.config import WorkerOptions
from worker.device import DeviceError


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of device memory."""

    total: int
    before: int  # in use before the pool is made: weights, and whatever other processes hold
    attention: int  # attention's buffers beside the pages
    peak: int  # that the largest step needs at its height, and gives back
    graphs: int  # that captured graphs keep


def pool_pages(options: WorkerOptions, measured: Measured, groups: CacheGroups) -> tuple[int, int]:
    """Return the KV pages of both cache groups, without dummy pages. Raises DeviceError, saying what fills the memory.

    `--num-pages` and `--kv-cache-memory-bytes` are obeyed without measuring.
    """
    if options.num_pages is not None:
        return groups.resolve_num_pages(options.num_pages)
    page_bytes = groups.bytes(bool(groups.full_layers), bool(groups.window))
    if options.kv_bytes is not None:
        room = options.kv_bytes
    else:
        share = int(measured.total * options.gpu_memory_utilization)
        room = share - measured.before - measured.attention - measured.peak - measured.graphs - page_bytes
    full, windowed = groups.divide(max(room, 0))
    if full < bool(groups.full_layers) or windowed < bool(groups.window):
        m = measured
        raise DeviceError(
            f"no room for KV memory: --gpu-memory-utilization {options.gpu_memory_utilization} of {_gb(m.total)}, of "
            f"which weights and others take {_gb(m.before)}, buffers {_gb(m.attention)}, steps {_gb(m.peak)}, "
            f"graphs {_gb(m.graphs)}; one page needs {page_bytes} bytes"
        )
    return full, windowed


def used_memory() -> int:
    """Return the bytes of the device that any process uses now."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
