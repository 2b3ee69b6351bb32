"""How many pages of KV memory a worker gets."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from proto.config import WorkerOptions
from worker.loader.errors import LoadError
from worker.parallel import Group

DEFAULT_BYTES = 4 << 30  # on a CPU, whose memory others use too; --kv-bytes or --num-pages asks for more


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_pages: int
    max_model_len: int  # what was wanted, or what the pages hold if that is less


def size_pool(options: WorkerOptions, bytes_per_token: int) -> PoolSize:
    """Pages by `num_pages`, else by `kv_bytes`, else by memory.

    By memory: `gpu_memory_utilization` of what is available now, but no more than DEFAULT_BYTES (unless one
    sequence of max_model_len needs more) nor than max_num_seqs such sequences could fill. Ranks are on one machine
    and share its memory; `bytes_per_token` is what one rank holds. Raises LoadError when not even one page fits, or
    when more is asked for than there is.
    """
    wanted_len = options.max_model_len or options.manifest.config.max_position_embeddings
    pages_per_sequence = -(-wanted_len // options.page_size)
    page_bytes = bytes_per_token * options.page_size
    memory = available_memory() // options.tensor_parallel_size
    if options.num_pages is not None:
        pages, why = options.num_pages, f"num_pages = {options.num_pages}"
    elif options.kv_bytes is not None:
        pages, why = options.kv_bytes // page_bytes, f"kv_bytes = {options.kv_bytes}"
    else:
        available = int(memory * options.gpu_memory_utilization)
        cap = max(DEFAULT_BYTES // options.tensor_parallel_size, pages_per_sequence * page_bytes)
        pages = min(min(available, cap) // page_bytes, options.max_num_seqs * pages_per_sequence)
        why = f"gpu_memory_utilization {options.gpu_memory_utilization} of the memory available = {available}"
    if pages < 1:
        raise LoadError(f"no room for KV memory: {why} bytes, and one page needs {page_bytes}")
    if pages * page_bytes > memory:
        raise LoadError(f"no room for KV memory: {why} takes {pages * page_bytes} bytes, and {memory} are available")
    return PoolSize(pages, min(wanted_len, pages * options.page_size))


def agree_on_pool(pool: PoolSize, group: Group, page_size: int) -> PoolSize:
    """The pool that every rank can have: plans name pages, and all ranks run the same plans."""
    pages = group.minimum(pool.num_pages)
    return PoolSize(pages, min(pool.max_model_len, pages * page_size))


def available_memory() -> int:
    """Bytes that this process may still use: the machine's, or what its cgroup leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)
