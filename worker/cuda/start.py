"""From options to a GPU that is ready to run plans: weights, a pool sized by measurement, graphs."""

import gc
import logging

import msgspec
import numpy as np
import torch

from proto.cache import CacheGroups
from proto.config import WorkerOptions
from proto.messages import WorkerFacts
from worker.cuda.attention import CudaAttention, KvFormat, Limits
from worker.cuda.backends import BACKENDS
from worker.cuda.device import CudaDevice, Graphs, pages_per_slot, words_of_a_step
from worker.cuda.gpus import require_cuda
from worker.cuda.graphs import DecodeGraphs
from worker.cuda.memory import Measured, pool_pages, used_memory
from worker.cuda.ops import CudaOps
from worker.cuda.piecewise import PiecewiseGraphs, busy_tokens, token_sizes
from worker.cuda.sampling import Mode
from worker.cuda.self_test import check_batch_invariance
from worker.cuda.state import SlotPages, SlotState
from worker.cuda.step import GpuStep
from worker.cuda.tiles import list_stride, most_rows, tokens_of_a_tile
from worker.device import DeviceError, facts_of, wanted_length
from worker.layers.attention import AttentionShape, choose_backend
from worker.loader.kv_scales import kv_scales
from worker.loader.load import Progress
from worker.loader.model import load_model, resolve_dtype
from worker.ranks.group import ALONE, Group
from worker.steps.prompts import step as prompts_step

log = logging.getLogger(__name__)


def start(options: WorkerOptions, progress: Progress, group: Group = ALONE) -> CudaDevice:
    """Load, measure, allocate, capture: all ranks of `group` together.

    Raises DeviceError, which names what is missing or the flag or file at fault, and PeerLostError.
    """
    require_cuda()
    return _Start(options, progress, group).device()


class _Start:
    """The steps of a start. The pool is made twice: small, to measure what else needs room, then for good."""

    def __init__(self, options: WorkerOptions, progress: Progress, group: Group) -> None:
        config = options.manifest.config
        if config.alibi and group.size > 1:  # FlashInfer's kernels take slopes by a head's number on this rank
            raise DeviceError(
                f"--tensor-parallel-size {group.size}: device cuda runs models with ALiBi on one rank only"
            )
        self._make_attention = choose_backend(BACKENDS, options.attention_backend, options.device)
        self._options = options
        self._progress = progress
        self._group = group
        self._local = group.shape(config)
        self._dtype = resolve_dtype(options.dtype, config.dtype, {"float32": "bfloat16"})
        self._kv_format = _kv_format(options, self._dtype)
        self._wanted_len = wanted_length(options)
        token_bytes = self._local.kv_bytes_per_token(self._kv_format.dtype.itemsize)
        self._cache = CacheGroups.of(self._local, options.page_size, token_bytes, self._wanted_len)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if group.size > 1:
            self._connect()
        # Shares may be unequal, but all ranks must capture the same graphs.
        self._busy_tokens = group.minimum(busy_tokens(self._local))
        self._tile_tokens = tokens_of_a_tile(self._local) if options.deterministic else 0
        ops = CudaOps(deterministic=options.deterministic)
        self._model = load_model(options, ops, self._dtype, self._wanted_len, progress, group, "cuda")

    def device(self) -> CudaDevice:
        options = self._options
        fixed = options.num_pages is not None or options.kv_bytes is not None
        full, windowed = pool_pages(options, _NOTHING if fixed else self._measure(), self._cache)
        facts = self._facts((self._group.minimum(full), self._group.minimum(windowed)))
        step = self._step(facts)
        # Weights and buffers were made on several streams; steps run on one of their own.
        torch.cuda.synchronize()
        if options.deterministic:
            self._progress("checking that outputs do not depend on the batch", 0, 0)
            check_batch_invariance(step, facts, self._stream, self._tile_tokens)
        graphs = self._capture(step)
        return CudaDevice(
            facts, step, graphs, self._stream, depth=options.pipeline_depth, tile_tokens=self._tile_tokens
        )

    def _facts(self, pages: tuple[int, int]) -> WorkerFacts:
        return facts_of(
            self._options,
            dtype=str(self._dtype).removeprefix("torch."),
            kv_element_bytes=self._kv_format.dtype.itemsize,
            pages=pages,
            window=self._cache.window,
        )

    def _step(self, facts: WorkerFacts) -> GpuStep:
        options, config, size = self._options, self._options.manifest.config, facts.page_size
        shape = AttentionShape.of(
            config,
            self._group,
            dtype=self._dtype,
            page_size=size,
            num_pages=facts.num_pages,
            window_pages=facts.window_pages,
        )
        rows = facts.max_num_seqs
        tokens = max(facts.max_num_batched_tokens, rows)
        cut_rows = rows
        if self._tile_tokens:
            cut_rows = most_rows(rows, tokens, self._tile_tokens, size, facts.window)
        limits = Limits(
            max_rows=cut_rows,
            max_tokens=tokens,
            max_pages_per_row=pages_per_slot(facts.max_model_len, size),
            depth=options.pipeline_depth + 1,
        )
        with torch.cuda.stream(self._stream):
            attention = self._make_attention(shape, limits, self._kv_format, deterministic=options.deterministic)
            return GpuStep(
                self._model,
                attention,
                self._state(facts, attention),
                self._group,
                max_rows=rows,
                vocab_size=facts.vocab_size,
                words=words_of_a_step(facts, len(attention.groups), cut_rows),
            )

    def _state(self, facts: WorkerFacts, attention: CudaAttention) -> SlotState:
        device, slots = torch.device("cuda"), facts.max_num_seqs
        groups = {
            group: SlotPages(
                slots,
                pages_per_slot(facts.max_model_len, facts.page_size),
                facts.page_size,
                pages.dummy_page,
                len(pages.kv_indices),
                device,
                window=facts.window if group else 0,
                stride=list_stride(facts.page_size) if self._tile_tokens else 1,
            )
            for group, pages in attention.groups.items()
        }
        return SlotState(slots, groups, device)

    def _connect(self) -> None:
        """Exchange a little and a lot. Ranks set up a transport for each, which takes memory and time and must be done
        before a capture."""
        hidden = self._options.manifest.config.hidden_size
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for rows in (1, self._options.max_num_batched_tokens):
                x = torch.zeros(rows, hidden, dtype=self._dtype, device="cuda")
                self._group.of_rank_0(self._group.concatenate(self._group.sum(x)))
        torch.cuda.synchronize()

    def _capture(self, step: GpuStep) -> Graphs | None:
        if self._options.enforce_eager:
            return None
        decode = DecodeGraphs(step, self._stream, self._options.max_num_seqs)
        decode.capture(decode.sizes, self._progress)
        chunks = self._chunk_graphs()
        chunks.capture(self._progress)
        return Graphs(decode, chunks)

    def _chunk_graphs(self) -> PiecewiseGraphs:
        sizes = token_sizes(self._options.max_num_batched_tokens, self._busy_tokens)
        return PiecewiseGraphs(self._model, self._stream, sizes)

    # ------------------------------------------------------------------ measuring

    def _measure(self) -> Measured:
        """Measure what everything but the pool takes, with a pool that just holds the largest step."""
        options = self._options
        self._progress("measuring device memory", 0, 0)
        lengths = self._prompts()
        each = sum(-(-length // options.page_size) for length in lengths)
        pages = each * bool(self._cache.full_layers), each * bool(self._cache.window)
        torch.cuda.empty_cache()  # what loading left behind
        before = used_memory()
        step = self._step(msgspec.structs.replace(self._facts(pages), max_model_len=self._wanted_len))
        attention = used_memory() - before - self._cache.bytes(*(count and count + 1 for count in pages))
        peak = self._peak(step, lengths)
        kept = self._graph_bytes(step)
        del step
        gc.collect()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        measured = Measured(total=total, before=before, attention=attention, peak=peak, graphs=kept)
        log.info("device memory in bytes: %s", measured)
        return measured

    def _prompts(self) -> list[int]:
        """Return lengths of prompts that fill the largest step."""
        tokens, longest = self._options.max_num_batched_tokens, self._wanted_len
        return [min(longest, tokens - at) for at in range(0, tokens, longest)][: self._options.max_num_seqs]

    def _peak(self, step: GpuStep, lengths: list[int]) -> int:
        """Return the bytes that the largest step holds at its peak, beyond what is there before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        standing = torch.cuda.memory_allocated()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            _run_prompts(step, lengths, self._options.page_size)
            step.sample(self._options.max_num_seqs, Mode.FILTERED)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - int(standing)

    def _graph_bytes(self, step: GpuStep) -> int:
        """Return the bytes that all graphs will keep. Decode graphs share the largest one's memory, and each of the
        others adds what the second one does."""
        if self._options.enforce_eager:
            return 0
        graphs = DecodeGraphs(step, self._stream, self._options.max_num_seqs)
        used = [used_memory()]
        for size in reversed(graphs.sizes[-2:]):
            graphs.capture([size], self._progress)
            torch.cuda.synchronize()
            used.append(used_memory())
        each = max(used[-1] - used[1], 0)
        decode = max(used[1] - used[0], 0) + each * (len(graphs.sizes) - 1)
        chunks = self._chunk_graphs()
        chunks.capture(self._progress)  # all of them: they share little
        torch.cuda.synchronize()
        return decode + max(used_memory() - used[-1], 0)


def _kv_format(options: WorkerOptions, dtype: torch.dtype) -> KvFormat:
    if options.kv_cache_dtype == "auto":
        return KvFormat(dtype)
    scales = () if options.load_format == "dummy" else kv_scales(options.manifest)
    log.info(
        "K and V are stored in fp8, %s", "scaled as the checkpoint says" if scales else "unscaled, clamped to ±448"
    )
    return KvFormat(torch.float8_e4m3fn, scales)


_NOTHING = Measured(total=0, before=0, attention=0, peak=0, graphs=0)


def _run_prompts(step: GpuStep, lengths: list[int], page_size: int) -> None:
    """Run a forward pass over prompts of zeros, eagerly, with as many rows of logits as a step may want."""
    batch = prompts_step([np.zeros(n, np.int32) for n in lengths], page_size)
    step.attention.plan(batch)
    ids = torch.zeros(len(batch.token_ids), dtype=torch.int32, device="cuda")
    positions = torch.from_numpy(batch.positions).to("cuda")
    hidden = step.model.hidden(ids, positions, step.attention)
    rows = min(len(step.logits), len(hidden))
    step.logits[:rows].copy_(step.model.logits(hidden[:rows]))
