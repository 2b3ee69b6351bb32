"""How many pages of KV memory a CPU worker gets."""

from pathlib import Path

import psutil

from proto.cache import CacheGroups
from proto.config import WorkerOptions
from worker.device import DeviceError

DEFAULT_BYTES = 4 << 30  # on a CPU, whose memory others use too; --kv-cache-memory-bytes or --num-pages asks for more


def pool_pages(options: WorkerOptions, groups: CacheGroups) -> tuple[int, int]:
    """Return the pages of both cache groups: as many as were asked for, by number or by bytes, else by memory.

    By memory: `gpu_memory_utilization` of what is available now, but no more than DEFAULT_BYTES (unless one
    sequence of the wanted length needs more) nor than max_num_seqs such sequences could fill. All workers are on one
    machine and share its memory; `groups` are of one rank. Raises DeviceError when not even one page fits, or when more
    is asked for than there is.
    """
    memory = available_memory() // options.num_workers
    if options.num_pages is not None:
        pages, why = groups.resolve_num_pages(options.num_pages), f"--num-pages {options.num_pages}"
    elif options.kv_bytes is not None:
        pages, why = groups.divide(options.kv_bytes), f"--kv-cache-memory-bytes {options.kv_bytes}"
    else:
        available = int(memory * options.gpu_memory_utilization)
        pages = _pages_within(options, groups, available)
        why = f"--gpu-memory-utilization {options.gpu_memory_utilization} of the available memory, {available} bytes,"
    one = groups.bytes(bool(groups.full_layers), bool(groups.window))
    if groups.bytes(*pages) < one or (groups.full_layers and not pages[0]) or (groups.window and not pages[1]):
        raise DeviceError(f"no room for KV memory: {why} holds no page, which needs {one} bytes")
    if groups.bytes(*pages) > memory:
        raise DeviceError(
            f"no room for KV memory: {why} takes {groups.bytes(*pages)} bytes, and {memory} are available"
        )
    return pages


def _pages_within(options: WorkerOptions, groups: CacheGroups, available: int) -> tuple[int, int]:
    """Divide so many bytes, or fewer where that is enough for all sequences that may run at once."""
    sequence = groups.pages(groups.max_len)
    cap = max(DEFAULT_BYTES // options.num_workers, groups.bytes(*groups.resolve_num_pages(max(sequence))))
    full, windowed = groups.divide(min(available, cap))
    chunk = -(-options.max_num_batched_tokens // options.page_size) if groups.window else 0
    return min(full, options.max_num_seqs * sequence[0]), min(windowed, options.max_num_seqs * sequence[1] + chunk)


def available_memory() -> int:
    """Return the bytes that this process may still use: the machine's, or what its cgroup leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)
