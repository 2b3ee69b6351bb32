"""How many pages of KV memory a worker gets."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from proto.cache import CacheGroups, longest_sequence
from proto.config import WorkerOptions
from worker.loader.errors import LoadError
from worker.ranks.group import Group

DEFAULT_BYTES = 4 << 30  # on a CPU, whose memory others use too; --kv-bytes or --num-pages asks for more


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_pages: int  # of layers that attend to all positions; 0 = there are none
    max_model_len: int  # what was wanted, or what the pages hold if that is less
    window: int = 0  # of the other layers, the largest; 0 = all layers have `num_pages`
    window_pages: int = 0


def size_pool(options: WorkerOptions, bytes_per_token: int) -> PoolSize:
    """Pages by `num_pages`, else by `kv_bytes`, else by memory; divided between layers as `proto.cache` says.

    By memory: `gpu_memory_utilization` of what is available now, but no more than DEFAULT_BYTES (unless one
    sequence of max_model_len needs more) nor than max_num_seqs such sequences could fill. All workers are on one
    machine and share its memory; `bytes_per_token` is what one rank holds. Raises LoadError when not even one page
    fits, or when more is asked for than there is.
    """
    config = options.manifest.config
    wanted_len = options.max_model_len or config.max_position_embeddings
    groups = CacheGroups.of(config, options.page_size, bytes_per_token, wanted_len)
    memory = available_memory() // options.num_workers
    if options.num_pages is not None:
        pages, why = groups.beside(options.num_pages), f"num_pages = {options.num_pages}"
    elif options.kv_bytes is not None:
        pages, why = groups.divide(options.kv_bytes), f"kv_bytes = {options.kv_bytes}"
    else:
        available = int(memory * options.gpu_memory_utilization)
        sequence = groups.pages(wanted_len)
        cap = max(DEFAULT_BYTES // options.num_workers, groups.bytes(*groups.beside(max(sequence))))
        pages = groups.divide(min(available, cap))
        chunk = -(-options.max_num_batched_tokens // options.page_size) if groups.window else 0
        pages = (
            min(pages[0], options.max_num_seqs * sequence[0]),
            min(pages[1], options.max_num_seqs * sequence[1] + chunk),
        )
        why = f"gpu_memory_utilization {options.gpu_memory_utilization} of the memory available = {available}"
    one = groups.bytes(bool(groups.full_layers), bool(groups.window))
    if groups.bytes(*pages) < one or (groups.full_layers and not pages[0]) or (groups.window and not pages[1]):
        raise LoadError(f"no room for KV memory: {why} bytes, and one page needs {one}")
    if groups.bytes(*pages) > memory:
        raise LoadError(f"no room for KV memory: {why} takes {groups.bytes(*pages)} bytes, and {memory} are available")
    return _pool(pages, groups.window, options.page_size, wanted_len)


def agree_on_pool(pool: PoolSize, group: Group, page_size: int) -> PoolSize:
    """The pool that every rank can have: plans name pages, and all ranks run the same plans."""
    pages = group.minimum(pool.num_pages), group.minimum(pool.window_pages)
    return _pool(pages, pool.window, page_size, pool.max_model_len)


def _pool(pages: tuple[int, int], window: int, page_size: int, wanted: int) -> PoolSize:
    return PoolSize(pages[0], longest_sequence(pages[0], window, pages[1], page_size, wanted), window, pages[1])


def available_memory() -> int:
    """Bytes that this process may still use: the machine's, or what its cgroup leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)
