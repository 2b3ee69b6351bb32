"""A GPU that runs steps one behind another on a stream, while the host goes on to the next plan."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from proto.channel import encode
from proto.messages import StepPlan, StepResult, TokenLogprobs, WorkerFacts
from proto.parameters import GREEDY_TEMPERATURE
from worker.cuda.attention import pad_indptr
from worker.cuda.frames import Frame, Frames, Span
from worker.cuda.graphs import DecodeGraphs
from worker.cuda.piecewise import PiecewiseGraphs
from worker.cuda.sampling import MOST_RANKED, Mode, SamplingTable, token_logprobs
from worker.cuda.step import GpuStep, MixedInputs
from worker.cuda.tiles import cut_chunks, list_stride
from worker.device import Completion, Deferred, StepClock
from worker.steps.batch import I32Array, StepBatch
from worker.steps.sampling import SamplingRows, sampling_records
from worker.steps.sequence import PlanSequence
from worker.steps.tables import SlotTables

_NOTHING = np.zeros(0, np.int32)
MASKED_IDS_PER_ROW = 1280  # stop ids that rows may forbid on average: a caller's 1024 and the model's own


def pages_per_slot(max_model_len: int, page_size: int) -> int:
    """Return a slot's most pages. One is to spare: a row at its end may hold the page of a token that never comes."""
    return -(-max_model_len // page_size) + 1


def words_of_a_step(facts: WorkerFacts, groups: int, max_rows: int) -> int:
    """Return the words of metadata of the largest step; `max_rows`: rows that it has once its chunks are cut."""
    rows, tokens = facts.max_num_seqs, max(facts.max_num_batched_tokens, facts.max_num_seqs)
    pages = pages_per_slot(facts.max_model_len, facts.page_size)
    return (
        2 * rows  # sampled rows
        + 3 * tokens + 2 * max_rows + rows  # `MixedInputs`, and of each group:
        + groups * (max_rows + 1 + 2 * rows * pages)  # indptr, pages that a plan may place
        + (1 + SamplingTable.WORDS) * rows
        + 2 * rows * MASKED_IDS_PER_ROW
        + rows  # that want log-probabilities
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Packed:
    """Spans of a plan's parts in the step's inputs; empty where the plan has no such part."""

    words: int
    bucket: int  # rows of the sampling graph; 0 = nothing is sampled
    mixed: MixedInputs | None
    # For a graph, by cache group whose page ids must be rebuilt: indptr, and how many ids
    kv_indptr: dict[int, tuple[Span, int]]
    placed: dict[int, tuple[Span, Span]]  # pages that the plan adds, by cache group: places and ids
    sampling_slots: Span
    sampling: Span
    masked_rows: Span
    masked_ids: Span
    logprob_rows: Span


@dataclass(frozen=True, slots=True)
class Graphs:
    """Graphs that are replayed instead of launching kernels one by one."""

    decode: DecodeGraphs
    chunks: PiecewiseGraphs


class CudaDevice:
    """Implements `worker.device.Device`. Made by `worker.cuda.start.start`.

    Host tables follow the plans as on every device; the device keeps the slots' pages, newest tokens and sampling
    parameters too, updated by the same deltas. Nothing here waits for the device: the output thread decides, in
    `Deferred.wait`, when a step's host memory may be used again.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        step: GpuStep,
        graphs: Graphs | None,
        compute: torch.cuda.Stream,
        *,
        depth: int,
        tile_tokens: int = 0,
    ) -> None:
        """`depth`: steps in flight. `tile_tokens`: longest row of a chunk, 0 = no bound (see `worker.cuda.tiles`)."""
        self.facts = facts
        self.clock = StepClock()
        self._step = step
        self._graphs = None if graphs is None else graphs.decode
        self._pieces = None if graphs is None else graphs.chunks
        self._compute = compute
        self._gpu = torch.cuda.current_device()
        self._copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._sequence = PlanSequence()
        stride = list_stride(facts.page_size) if tile_tokens else 1
        self._tables = SlotTables.of(facts, stride=stride, lists_pages=False)
        self._tile_tokens = tile_tokens
        # One more than steps in flight, since the output thread keeps the last one for the time of its end.
        self._frames = Frames(depth + 1, step.inputs.numel(), facts.max_num_seqs)
        self._last: Frame | None = None  # of the step before, with the output thread
        self._read: torch.cuda.Event | None = None  # what was drawn last has been copied

    def reset(self, epoch: int) -> None:
        """Forget all slots; the next plan is the first of `epoch`. Steps in flight end on their own."""
        self._sequence.reset(epoch)
        self._tables.reset()

    def launch(self, plan: StepPlan) -> Completion | Deferred | None:
        """Queue a step behind those launched before. Raises PlanError."""
        if not self._sequence.follows(plan):
            refusal = self._sequence.refuse(plan)
            return None if refusal is None else Completion(refusal, due=0)
        waited = self._tables.running_through(plan)
        batch = self._tables.apply(plan)
        rows = self._tables.sampling_rows(batch)
        if self._tile_tokens:
            batch = cut_chunks(batch, self._tile_tokens, self.facts.page_size, self.facts.window)
        frame = self._frames.take()
        packed = self._pack(frame, plan, batch, rows)
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            frame.started.record()
            self._step.inputs[: packed.words].copy_(frame.words[: packed.words], non_blocking=True)
            self._update(packed)
            self._forward(batch, packed)
            logprobs = self._sample(batch, rows, packed)
            frame.ended.record()
        self._fetch(frame, len(rows.slots), logprobs)
        return Deferred(lambda: self._finish(frame, plan, rows, waited))

    # ------------------------------------------------------------------ host to device

    def _pack(self, frame: Frame, plan: StepPlan, batch: StepBatch, rows: SamplingRows) -> _Packed:
        """Write the step's metadata into the frame."""
        graphs = self._graphs
        sampled = len(rows.slots)
        bucket = graphs.bucket(sampled) if graphs is not None and sampled else sampled
        padding = self._step.state.padding_slot
        frame.put(rows.slots, size=bucket, fill=padding)
        frame.put(batch.positions[batch.logit_tokens], size=bucket)
        mixed, kv_indptr = None, {}
        if graphs is None or batch.decode_rows < len(batch.slots):
            mixed = self._pack_mixed(frame, batch) if len(batch.slots) else None
        elif bucket:
            for group in self._step.state.groups:
                if not self._step.holds_indices(group, batch, bucket):
                    padded = pad_indptr(batch.of_group(group), bucket)
                    kv_indptr[group] = frame.put(padded), int(padded[-1])
        placed = {group: self._tables.placed_pages(group) for group in self._step.state.groups}
        wanted = np.flatnonzero(rows.params["logprobs"] >= 0).astype(np.int32)
        masked_rows = np.repeat(
            np.array([row for row, _ in rows.masked], np.int32), [len(ids) for _, ids in rows.masked]
        )
        masked_ids = np.concatenate([ids for _, ids in rows.masked]) if rows.masked else masked_rows
        return _Packed(
            bucket=bucket,
            mixed=mixed,
            kv_indptr=kv_indptr,
            placed={group: (frame.put(places), frame.put(pages)) for group, (places, pages) in placed.items()},
            sampling_slots=frame.put(np.array([row.slot for row in plan.admits], np.int32)),
            sampling=frame.put(_sampling_words(plan)),
            masked_rows=frame.put(masked_rows),
            masked_ids=frame.put(masked_ids),
            logprob_rows=frame.put(wanted),
            words=frame.used,
        )

    def _pack_mixed(self, frame: Frame, batch: StepBatch) -> MixedInputs:
        tokens = len(batch.token_ids)
        if self._pieces is not None:
            tokens = self._pieces.size_for(tokens) or tokens
        slots = np.repeat(batch.slots, np.diff(batch.qo_indptr))
        return MixedInputs(
            tokens=tokens,
            slots=frame.put(slots, size=tokens, fill=self._step.state.padding_slot),
            positions=frame.put(batch.positions, size=tokens),
            ids=frame.put(batch.token_ids, size=tokens),
            row_slots=frame.put(batch.slots),
            row_starts=frame.put(batch.positions[batch.qo_indptr[:-1]] if self.facts.window else _NOTHING),
            kv_indptr={g: frame.put(batch.of_group(g).kv_indptr) for g in self._step.state.groups},
            logit_tokens=frame.put(batch.logit_tokens),
        )

    def _update(self, packed: _Packed) -> None:
        """Apply the plan's deltas to the slots on the device."""
        step = self._step
        for group, (places, pages) in packed.placed.items():
            if not _empty(places):
                step.state.groups[group].place(step.view(places), step.view(pages))
        if not _empty(packed.sampling_slots):
            step.state.set_sampling(step.view(packed.sampling_slots), step.view(packed.sampling))

    # ------------------------------------------------------------------ arithmetic

    def _forward(self, batch: StepBatch, packed: _Packed) -> None:
        if packed.mixed is not None:
            pieces = self._pieces
            if pieces is not None and not pieces.size_for(packed.mixed.tokens):
                pieces = None
            self._step.mixed(batch, packed.mixed, pieces)
        elif self._graphs is not None and packed.bucket:
            slots, positions = (0, packed.bucket), (packed.bucket, 2 * packed.bucket)
            for group, (indptr, count) in packed.kv_indptr.items():
                self._step.place_indices(group, batch, packed.bucket, (slots, positions, indptr), count)
            self._step.attention.plan_graph(batch, packed.bucket)
            self._graphs.decode(packed.bucket)

    def _sample(self, batch: StepBatch, rows: SamplingRows, packed: _Packed) -> torch.Tensor | None:
        """Draw the step's ids. Returns float64 [n, 1 + 2k] for rows that want log-probabilities: see `_logprobs`."""
        if not packed.bucket:
            return None
        step = self._step
        count = int(rows.params["logprobs"].max())
        raw = None
        if count >= 0:  # taken from raw logits, before ids are forbidden
            wanted = step.view(packed.logprob_rows)
            raw = token_logprobs(step.logits[wanted], count)
        if not _empty(packed.masked_rows):
            step.mask(packed.masked_rows, packed.masked_ids)
        if self._read is not None:  # the copy of what the last step drew, long done
            self._compute.wait_event(self._read)
        mode = _mode(rows)
        if self._graphs is not None:
            self._graphs.sample(packed.bucket, mode)
        else:
            step.sample(packed.bucket, mode)
        if raw is None:
            return None
        ids, values, offsets = raw
        chosen = step.logits[wanted, step.drawn[wanted, 0]].double() - offsets
        return torch.cat([chosen[:, None], values, ids.double()], dim=1)

    # ------------------------------------------------------------------ device to host

    def _fetch(self, frame: Frame, sampled: int, logprobs: torch.Tensor | None) -> None:
        """Copy the drawn ids on a stream of their own, so that no step waits for them."""
        self._copies.wait_event(frame.ended)
        with torch.inference_mode(), torch.cuda.stream(self._copies):
            if sampled:
                frame.drawn[:sampled].copy_(self._step.drawn[:sampled], non_blocking=True)
            if logprobs is not None:
                frame.on_device = logprobs
                frame.logprobs_of(*logprobs.shape).copy_(logprobs, non_blocking=True)
            frame.arrived.record()
        self._read = frame.arrived

    def _finish(self, frame: Frame, plan: StepPlan, rows: SamplingRows, waited: bool) -> StepResult:
        """Wait for the copy and return the result. Called by the output thread, step after step."""
        torch.cuda.set_device(self._gpu)  # a new thread uses GPU 0, which may be another rank's
        frame.arrived.synchronize()
        drawn = frame.drawn.numpy()[: len(rows.slots)]
        ids, statuses = drawn[:, 0].copy(), drawn[:, 1].astype(np.uint8)
        logprobs = _logprobs(frame, rows, statuses)
        idle = self._account(frame, waited, len(ids))
        return StepResult(
            epoch=plan.epoch,
            step=plan.step,
            ids=ids.tobytes(),
            counts=b"",
            statuses=statuses.tobytes() if statuses.any() else b"",
            logprobs=logprobs,
            device_ns=self.clock.last_ns,
            idle_ns=idle,
        )

    def _account(self, frame: Frame, waited: bool, tokens: int) -> int:
        """Record the step by the device's own times, and free the frame before it. Returns idle ns."""
        gap = 0.0 if self._last is None else self._last.ended.elapsed_time(frame.started)
        start = (self.clock.free_at or time.monotonic_ns()) + int(gap * 1e6)
        idle = self.clock.record(start, start + int(frame.started.elapsed_time(frame.ended) * 1e6), waited, tokens)
        if self._last is not None:
            self._frames.give(self._last)
        self._last = frame
        return idle


def _empty(span: Span) -> bool:
    return span[0] == span[1]


def _mode(rows: SamplingRows) -> Mode:
    """Return the cheapest mode that samples these rows as they ask."""
    params = rows.params
    draws = params["temperature"] >= GREEDY_TEMPERATURE
    if not draws.any():
        return Mode.GREEDY
    ranked = draws & ((params["top_k"] > 0) | (params["top_p"] < 1.0))
    if not (ranked | (draws & (params["min_p"] > 0.0))).any():
        return Mode.PLAIN
    cut = (params["top_k"] > 0) & (params["top_k"] <= MOST_RANKED)
    return Mode.CUT if (cut | ~ranked).all() else Mode.FILTERED


def _sampling_words(plan: StepPlan) -> I32Array:
    """Rows of `SamplingTable` of the requests that the plan admits, one after another."""
    return sampling_records(plan.admits).view(np.int32)


def _logprobs(frame: Frame, rows: SamplingRows, statuses: np.ndarray) -> tuple[tuple[int, bytes], ...]:
    """Return encoded TokenLogprobs of rows that want them and have a token, as `worker.cpu.sampler.sample` does."""
    wanted = np.flatnonzero(rows.params["logprobs"] >= 0)
    if not len(wanted):
        return ()
    most = int(rows.params["logprobs"].max())
    values = frame.logprobs_of(len(wanted), 1 + 2 * most).numpy()
    found = []
    for row, line in zip(wanted.tolist(), values, strict=True):
        count = int(rows.params["logprobs"][row])
        if statuses[row]:
            continue
        top = line[1 : 1 + count].tolist()
        ids = line[1 + most : 1 + most + count].astype(np.int32)
        message = TokenLogprobs(chosen=(float(line[0]),), top_ids=(ids.tobytes(),), top_logprobs=(tuple(top),))
        found.append((row, encode(message)))
    return tuple(found)
