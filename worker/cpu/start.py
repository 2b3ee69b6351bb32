"""From options to a CPU that is ready to run plans: devices "cpu" and "reference"."""

import os

import numba
import torch

from proto.cache import CacheGroups
from proto.config import WorkerOptions
from worker.cpu.backends import BACKENDS
from worker.cpu.device import CpuDevice
from worker.cpu.gemm import find_rule
from worker.cpu.ops import CpuOps
from worker.cpu.pool import pool_pages
from worker.cpu.reference_ops import ReferenceOps
from worker.cpu.self_test import check_batch_invariance
from worker.cpu.step import CpuStep
from worker.device import facts_of, wanted_length
from worker.layers.attention import AttentionShape, choose_backend
from worker.layers.gemm_shape import GemmShape
from worker.layers.ops import Ops
from worker.loader.load import Progress
from worker.loader.model import build_model, load_model, resolve_dtype
from worker.ranks.group import ALONE, Group

_BACKENDS = {"cpu": BACKENDS, "reference": {"reference": BACKENDS["reference"]}}  # by device
_INSTEAD = {"float16": "float32"}  # CPUs compute float16 slowly, and our kernels not at all


def start(options: WorkerOptions, progress: Progress, group: Group = ALONE) -> CpuDevice:
    """Load, allocate and check: all ranks of `group` together.

    Raises DeviceError, which names the flag or file at fault, and PeerLostError.
    """
    step = load(options, progress, group)
    return CpuDevice(step.facts, step.logits, group)


def load(options: WorkerOptions, progress: Progress, group: Group = ALONE) -> CpuStep:
    """Read weights, allocate KV memory, compile what needs compiling, and check batch invariance.

    All ranks of `group` do the same at the same time; each checks the whole logits. Raises as `start`.
    """
    config = options.manifest.config
    make_attention = choose_backend(_BACKENDS[options.device], options.attention_backend, options.device)
    dtype = resolve_dtype(options.dtype, config.dtype, _INSTEAD)
    threads = _set_threads(options)
    local = group.shape(config)
    cache = CacheGroups.of(local, options.page_size, local.kv_bytes_per_token(dtype.itemsize), wanted_length(options))
    full, windowed = pool_pages(options, cache)
    pages = group.minimum(full), group.minimum(windowed)  # plans name pages, and all ranks run the same plans
    facts = facts_of(
        options,
        dtype=str(dtype).removeprefix("torch."),
        kv_element_bytes=dtype.itemsize,
        pages=pages,
        window=cache.window,
    )
    shape = AttentionShape.of(
        config, group, dtype=dtype, page_size=options.page_size, num_pages=pages[0], window_pages=pages[1]
    )
    ops: Ops = ReferenceOps()
    if options.device == "cpu":
        progress("checking matrix products", 0, 0)
        shapes = _gemm_shapes(options, dtype, group.size)
        ops = CpuOps(group.agree(lambda: find_rule(shapes)), threads)  # all ranks must pad alike
    attention = make_attention(shape, threads)
    # The length that is wanted, whatever the pages hold: LongRoPE's choice must not follow from free memory.
    model = load_model(options, ops, dtype, wanted_length(options), progress, group)
    step = CpuStep(facts, model, attention, ops.row_multiple)
    progress("compiling kernels and checking that outputs do not depend on the batch", 0, 0)
    check_batch_invariance(step)
    return step


def _set_threads(options: WorkerOptions) -> int:
    """Give torch this worker's share of the cores, or as many threads as were asked for."""
    cores = max(len(os.sched_getaffinity(0)) // options.num_workers, 1)
    threads = min(options.threads or cores, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    return int(threads)


def _gemm_shapes(options: WorkerOptions, dtype: torch.dtype, ranks: int) -> list[GemmShape]:
    """Return the matrix products of all ranks, each once, from models that hold no memory."""
    found: dict[GemmShape, None] = {}
    for rank in range(ranks):
        model = build_model(options.manifest, ReferenceOps(), dtype, 1, Group(rank, ranks), "meta")
        found |= dict.fromkeys(model.gemm_shapes(options.max_num_batched_tokens, options.max_num_seqs))
    return list(found)
