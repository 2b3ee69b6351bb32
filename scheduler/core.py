"""The scheduler: messages in, plans and messages out. No socket and no clock.

Three doors. `on_message` takes what the inbox brought; `plan` makes the next step, if the pipeline has room; and
`outgoing` builds what others are to be told. Between the results of step N and the plan of step N+2 runs only
what that plan depends on: everything else waits in `Outbound` for `outgoing`.
"""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from proto.config import SchedulerOptions
from proto.ids import StageKind, server_of
from proto.messages import (
    I32,
    U32,
    U64,
    Abort,
    Admit,
    AdmitRow,
    Census,
    CensusReply,
    Desync,
    Finish,
    Flush,
    FlushReply,
    Message,
    Reject,
    RejectCode,
    Reset,
    RowStatus,
    StepPlan,
    StepResult,
    Timing,
    WorkerFacts,
    World,
    column,
)
from scheduler.admission import Admission, Refusal, Verdict
from scheduler.emit import BareRow, End, Outbound, Outgoing, StepRows
from scheduler.pages import I32Array
from scheduler.prefix import Path
from scheduler.queue import Queues
from scheduler.registry import Registry
from scheduler.request import ID_BYTES, Request, State
from scheduler.rows import Mask, RowView
from scheduler.running import Running
from scheduler.stops import StopTable

_LONG_SHARE = 4  # a long prefill gets at least 1/4 of what decodes leave, however many short ones come
_RESCAN_STEPS = 32  # steps after which a queue that found no pages is looked at again in any case
_MAX_OVERTAKES = 64  # requests that may pass one which waits for pages; then all wait for it


class WorkerError(RuntimeError):
    """The worker broke the step protocol, or refused a plan."""


@dataclass(slots=True)
class InFlight:
    """A planned step whose result is awaited."""

    step: int
    view: RowView  # rows that sample, in plan order
    firsts: list[tuple[int, Request]]  # (row, request) of final chunks: their first id since placement
    bare: list[Request]  # prefill-only requests that this step completes
    prefill_tokens: int


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    rejected: int = 0
    aborted: int = 0
    superseded: int = 0
    ignored_admits: int = 0  # of a past attempt, or aborted before they came
    leaked: int = 0  # aborted because their server no longer listed them
    preemptions: int = 0
    wasted_rows: int = 0  # decoded past a stop id
    dropped_rows: int = 0  # results of rows that had left their slot
    failed_rows: int = 0
    stalled_steps: int = 0
    stale_results: int = 0


class Scheduler:
    """One replica's queue, batch, pages and prefix tree.

    `epoch` is this scheduler's incarnation; the worker's first message must be `reset`.
    """

    def __init__(self, options: SchedulerOptions, worker: WorkerFacts, epoch: int) -> None:
        self._options = options
        self._facts = worker
        self._epoch = epoch
        self._budget = min(options.max_num_batched_tokens, worker.max_num_batched_tokens)
        # Every running row decodes in every step, so there are no more rows than a step has tokens.
        capacity = min(options.max_num_seqs, worker.max_num_seqs, self._budget)
        self._running = Running(worker, capacity, options.prefix_caching)
        self._admission = Admission(options, worker, self._running, self._budget)
        self._queues = Queues()
        self._registry = Registry()
        self._stops = StopTable(worker.vocab_size)
        self._out = Outbound()
        self._flight: deque[InFlight] = deque()
        self._deadlines: list[tuple[int, int, int]] = []  # (deadline, rid, attempt) of requests that may wait
        self._detokenizers = 1
        self._step = 0
        self._sent_view: RowView | None = None
        self._forced_at = 0  # step of the last forced preemption
        self._forced_slot = -1
        self._cramped = False  # decodes left a prompt that must run in one step too little room
        self._stuck: tuple[int, int, int, int] | None = None  # see `_nothing_new`
        self.counts = Counts()

    @property
    def reset(self) -> Reset:
        return Reset(epoch=self._epoch)

    @property
    def in_flight(self) -> int:
        """Steps planned whose results have not come."""
        return len(self._flight)

    # ---------------------------------------------------------------- doors

    def on_message(self, message: Message, now: int) -> None:
        """Take one message; `now` is monotonic ns. Raises WorkerError when the worker is out of step."""
        match message:
            case StepResult():
                self._on_result(message, now)
            case Admit():
                self._on_admit(message, now)
            case Abort():
                self._on_abort(message)
            case Census():
                self._on_census(message, now)
            case Flush():
                pages = self._running.tree.flush()
                self._out.send(StageKind.SERVER, server_of(message.rid), FlushReply(rid=message.rid, pages=pages))
            case World():
                self._on_world(message)
            case Desync():
                raise WorkerError(
                    f"the worker refuses plan {message.step} of epoch {message.epoch}: it is at epoch "
                    f"{message.expected_epoch}, step {message.expected_previous}"
                )

    def plan(self, now: int) -> StepPlan | None:
        """The next step; None when the pipeline is full or there is nothing to run."""
        if len(self._flight) >= self._options.pipeline_depth:
            return None
        if self._deadlines:
            self._expire(now)
        forced = self._force_preemption()
        view, append_slots, append_pages, preempted = self._plan_decodes()
        may_admit = not (forced or preempted) or not (len(view) or self._flight)
        chunks: dict[Request, int] = {}
        admits: list[AdmitRow] = []
        if self._running.prefills or self._queues:
            paused = self._cramped and may_admit
            decodes = 0 if paused else len(view)
            self._plan_prefills(self._budget - decodes, may_admit, chunks, admits, now)
            if paused and chunks:
                view = self._running.rows.view(view.slots[:0])
        if not len(view) and not chunks:
            return None
        return self._issue(view, append_slots, append_pages, chunks, admits)

    def outgoing(self) -> list[Outgoing]:
        """What detokenizers and servers are to be told since the last call, in order."""
        return self._out.build(self._detokenizers)

    def counters(self) -> dict[str, float]:
        """For the heartbeat."""
        pool, tree, counts = self._running.pool, self._running.tree, self.counts
        thrash = self._admission.thrash
        return {
            "running": float(self._running.count),
            "waiting": float(len(self._queues)),
            "waiting_tokens": float(self._queues.tokens),
            "pages_total": float(pool.num_pages),
            "pages_free": float(pool.free),
            "pages_cached": float(pool.idle),
            "step": float(self._step),
            "evictions": float(tree.evictions),
            "preempted_tokens": float(thrash.preempted_tokens),
            "thrash": thrash.ratio,
            "throttled_pages": float(thrash.headroom(pool.num_pages)),
            "prefill_tokens_per_second": self._admission.speed.tokens_per_second,
            **{name: float(getattr(counts, name)) for name in Counts.__slots__},
        }

    # ---------------------------------------------------------------- requests come

    def _on_admit(self, admit: Admit, now: int) -> None:
        rid, attempt = admit.rid, admit.attempt
        if self._registry.is_buried(rid, attempt) or self._registry.is_disowned(rid):
            self.counts.ignored_admits += 1
            return
        present = self._registry.requests.get(rid)
        if present is not None:
            if attempt <= present.attempt:
                self.counts.ignored_admits += 1
                return
            self.counts.superseded += 1
            self._drop(present)
        refusal = self._admission.never(admit) or self._admission.queue_full(len(self._queues), self._queues.tokens)
        if refusal is not None:
            self._reject(rid, attempt, refusal)
            return
        request = self._accept(admit, now)
        if not self._ends_at_once(request):
            self._enqueue(request, now)

    def _accept(self, admit: Admit, now: int) -> Request:
        prompt_len = len(admit.prompt_ids) // ID_BYTES
        request = Request(
            rid=admit.rid,
            attempt=admit.attempt,
            ids=admit.prompt_ids + admit.output_ids,
            prompt_len=prompt_len,
            max_len=prompt_len + admit.max_new_tokens,
            min_len=prompt_len + admit.min_new_tokens,
            sampling=admit.sampling,
            stop_ids=admit.stop_ids,
            stops=self._stops.acquire(admit.stop_ids, admit.num_eos),
            work_class=admit.work_class,
            priority=admit.priority,
            deadline=admit.deadline,
            arrival=admit.arrival or now,
            opening=admit.opening,
            detokenizer=admit.rid % self._detokenizers,
            path=Path(admit.cache_salt),
            seen=now,
        )
        self._registry.requests[request.rid] = request
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.rid, request.attempt))
        return request

    def _ends_at_once(self, request: Request) -> bool:
        """A continuation may have all its output already: only its end was lost."""
        if not request.resumed:
            return False
        last = int.from_bytes(request.ids[-ID_BYTES:], "little")
        if last in request.stops.ids and request.tokens > request.min_len:
            end = End(0, Finish.STOP, last, request.stops.ids[last])
        elif request.tokens >= request.max_len:
            end = End(0, Finish.LENGTH)
        else:
            return False
        request.first_scheduled = request.seen
        self._out.bare(self._step, BareRow(request, end, self._open(request, request.seen)))
        self._forget(request)
        self.counts.finished += 1
        return True

    def _enqueue(self, request: Request, now: int) -> None:
        uncached = self._admission.match(request)
        refusal = self._admission.late(request, now)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        request.state = State.QUEUED
        request.long = self._admission.is_long(uncached)
        self._queues.push(request)

    # ---------------------------------------------------------------- requests go

    def _on_abort(self, abort: Abort) -> None:
        for rid, attempt in zip(column(abort.rids, U64).tolist(), column(abort.attempts, U32).tolist(), strict=True):
            self._registry.bury(rid, attempt)
            request = self._registry.requests.get(rid)
            if request is not None and request.attempt <= attempt:
                self.counts.aborted += 1
                self._drop(request)

    def _on_census(self, census: Census, now: int) -> None:
        unknown, leaked = self._registry.census(census, now)
        for request in leaked:
            self.counts.leaked += 1
            self._drop(request)
        if unknown:
            rids, attempts = zip(*unknown, strict=True)
            reply = CensusReply(rids=np.array(rids, U64).tobytes(), attempts=np.array(attempts, U32).tobytes())
            self._out.send(StageKind.SERVER, server_of(rids[0]), reply)

    def _on_world(self, world: World) -> None:
        detokenizers = sum(info.kind is StageKind.DETOKENIZER for info in world.stages)
        self._detokenizers = max(self._detokenizers, detokenizers)
        for request in self._registry.learn(world):
            self.counts.aborted += 1
            self._drop(request)

    def _expire(self, now: int) -> None:
        """Refuse waiting requests whose deadline has passed. Running ones are the server's to abort."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, rid, attempt = heapq.heappop(self._deadlines)
            request = self._registry.requests.get(rid)
            if request is None or request.attempt != attempt or request.state is not State.QUEUED:
                continue
            refusal = self._admission.late(request, now)
            assert refusal is not None
            self._refuse(request, refusal)

    def _drop(self, request: Request) -> None:
        """Free all that a request holds, in whatever state it is; nobody waits for its end."""
        if request.state is State.QUEUED:
            self._queues.remove(request)
        elif request.slot >= 0:
            self._running.leave([request], keep=False)
        if request.opened:
            self._out.close(request)
        self._forget(request)

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        """A request that was accepted ends with a Reject."""
        if request.ticket:
            self._drop(request)
        else:
            if request.opened:
                self._out.close(request)
            self._forget(request)
        self._reject(request.rid, request.attempt, refusal)

    def _reject(self, rid: int, attempt: int, refusal: Refusal) -> None:
        self.counts.rejected += 1
        reject = Reject(
            rid=rid,
            attempt=attempt,
            code=refusal.code,
            field=refusal.field,
            message=refusal.message,
            retry_after_ms=refusal.retry_after_ms,
        )
        self._out.send(StageKind.SERVER, server_of(rid), reject)

    def _forget(self, request: Request) -> None:
        request.state = State.ENDED
        self._stops.release(request.stops)
        del self._registry.requests[request.rid]

    # ---------------------------------------------------------------- preemption

    def _preempt(self, request: Request) -> None:
        """Back to the queue with all that is known; what is in flight for it will be dropped."""
        request.ids = self._running.rows.known_ids(request.slot)
        # The tree's keys are of these very ids, so the path stays a path of the longer list.
        self._running.leave([request], keep=True)
        request.state = State.QUEUED
        request.preemptions += 1
        request.long = self._admission.is_long(self._admission.match(request))
        self._queues.push(request)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.rid, request.attempt))
        self.counts.preemptions += 1
        self._admission.lengths.preempted()

    def _force_preemption(self) -> bool:
        """For debugging: every so many steps some eligible row must go, one slot after another."""
        every = self._options.debug_preempt_every
        step = self._step + 1
        if not every or step % every or self._forced_at == step:
            return False
        self._forced_at = step
        eligible = self._running.preemptible()
        if not eligible:
            return False
        request = next((r for r in eligible if r.slot > self._forced_slot), eligible[0])
        self._forced_slot = request.slot
        self._preempt(request)
        return True

    # ---------------------------------------------------------------- plan: decode rows

    def _plan_decodes(self) -> tuple[RowView, I32Array, I32Array, bool]:
        """Rows to decode, the pages appended to them, and whether some had to be preempted for it."""
        running, preempted = self._running, False
        while True:
            view = running.decode_view()
            needy = running.lacking_page(view)
            if needy.size <= running.pool.available:
                break
            victim = running.victim()
            if victim is None:
                # Rows have ids in flight; once they are known there is someone to preempt.
                view, needy = running.stall(view, needy)
                self.counts.stalled_steps += 1
                break
            self._preempt(victim)
            preempted = True
        return view, needy, running.append_pages(needy) if needy.size else needy, preempted

    # ---------------------------------------------------------------- plan: prefill

    def _plan_prefills(
        self, budget: int, may_admit: bool, chunks: dict[Request, int], admits: list[AdmitRow], now: int
    ) -> None:
        """Share the budget: a part for the long prefill whose turn it is, then short ones, the queue, the long."""
        longs = [request for request in self._running.prefills if request.long]
        longs.sort(key=lambda request: self._queues.rank(request.work_class, request.arrival, now))
        shorts = [request for request in self._running.prefills if not request.long]
        if longs and (shorts or self._queues):
            budget -= self._advance(longs[0], budget // _LONG_SHARE, chunks)
        for request in shorts:
            budget -= self._advance(request, budget, chunks)
        self._cramped = False
        if may_admit and budget > 0 and self._queues and not self._nothing_new():
            budget = self._admit_waiting(budget, chunks, admits, now)
        for request in longs:
            budget -= self._advance(request, budget, chunks)

    def _advance(self, request: Request, budget: int, chunks: dict[Request, int]) -> int:
        """Plan as much of a prefill as the budget holds; returns the tokens."""
        tokens = min(budget, request.tokens - request.done)
        if tokens > 0:
            self._running.advance(request, tokens)
            chunks[request] = chunks.get(request, 0) + tokens
            self._queues.charge(request.work_class, tokens)
        return tokens

    def _admit_waiting(self, budget: int, chunks: dict[Request, int], admits: list[AdmitRow], now: int) -> int:
        """Place waiting requests while there are slots, pages and budget; returns the budget left."""
        queues, rows = self._queues, self._running.rows
        blocked: list[Request] = []
        while budget > 0 and rows.free:
            request = queues.best(now)
            if request is None:
                break
            verdict = self._admission.fits(request, budget, now)
            if verdict is Verdict.FITS:
                queues.take(request)
                admits.append(self._place(request, now))
                budget -= self._advance(request, budget, chunks)
                for other in blocked:
                    other.overtaken += 1
                continue
            if verdict is Verdict.LATE or verdict is Verdict.PINNED:
                self._turn_away(request, verdict, now)
                continue
            if verdict is Verdict.PAGES:
                if request.overtaken >= _MAX_OVERTAKES:
                    break
                blocked.append(request)
            elif verdict is Verdict.BUDGET and not chunks:
                self._cramped = True
            queues.pass_by(request)
        queues.end_scan()
        if blocked and not admits:
            self._stuck = self._circumstances()
        return budget

    def _nothing_new(self) -> bool:
        """Whether the last scan was in vain for want of pages, and nothing has happened that could free some."""
        return self._stuck is not None and self._stuck == self._circumstances()

    def _circumstances(self) -> tuple[int, int, int, int]:
        running = self._running
        return running.rows.departures, self._queues.tickets, len(running.prefills), self._step // _RESCAN_STEPS

    def _turn_away(self, request: Request, verdict: Verdict, now: int) -> None:
        self._queues.take(request)
        refusal = self._admission.late(request, now) if verdict is Verdict.LATE else None
        self._refuse(request, refusal or self._admission.pinned(request))

    def _place(self, request: Request, now: int) -> AdmitRow:
        admission, counts = self._admission, self.counts
        request.long = admission.is_long(request.tokens - len(request.path) * self._facts.page_size)
        request.overtaken = 0
        row = self._running.place(request, admission.expected_pages(request))
        counts.prefix_query_tokens += request.tokens
        counts.prefix_hit_tokens += row.start
        if request.preemptions:
            admission.thrash.recomputed(request.tokens - row.start - 1)
        if not request.first_scheduled:
            request.first_scheduled = now
            request.cached_tokens = min(row.start, request.prompt_len)
        return row

    # ---------------------------------------------------------------- plan: the message

    def _issue(
        self,
        view: RowView,
        append_slots: I32Array,
        append_pages: I32Array,
        chunks: dict[Request, int],
        admits: list[AdmitRow],
    ) -> StepPlan:
        """Account the step as planned and write it down."""
        running = self._running
        decode_slots = None if view is self._sent_view else view.slots.tobytes()
        self._sent_view = view
        if len(view):
            running.decoded(view)
        flight = InFlight(self._step + 1, view, [], [], 0)
        packed = self._finish_chunks(flight, chunks) if chunks else b""
        self._flight.append(flight)
        self._step += 1
        return StepPlan(
            epoch=self._epoch,
            step=self._step,
            previous=self._step - 1,
            released=running.take_released(),
            admits=tuple(admits),
            append_slots=append_slots.tobytes(),
            append_pages=append_pages.tobytes(),
            append_groups=b"",
            decode_slots=decode_slots,
            chunks=packed,
        )

    def _finish_chunks(self, flight: InFlight, chunks: dict[Request, int]) -> bytes:
        """Rows of the chunks; those that complete their prompt sample, and decode from the next step on."""
        packed: list[int] = []
        sampling: list[int] = []
        decodes = len(flight.view)
        for request, tokens in chunks.items():
            complete = request.done == request.tokens
            sample = complete and not request.prefill_only
            packed += (request.slot, tokens, int(sample))
            flight.prefill_tokens += tokens
            if not complete:
                continue
            if sample:
                flight.firsts.append((decodes + len(sampling), request))
                sampling.append(request.slot)
            else:
                flight.bare.append(request)
            self._running.start_decoding(request)
        if sampling:
            slots = np.concatenate([flight.view.slots, np.array(sampling, np.int32)])
            flight.view = self._running.rows.view(slots)
        self.counts.prefill_tokens += flight.prefill_tokens
        return np.array(packed, I32).tobytes()

    # ---------------------------------------------------------------- results

    def _on_result(self, result: StepResult, now: int) -> None:
        if result.epoch != self._epoch:
            self.counts.stale_results += 1
            return
        if not self._flight or self._flight[0].step != result.step:
            expected = self._flight[0].step if self._flight else "none"
            raise WorkerError(f"result of step {result.step}; awaited: {expected}")
        flight = self._flight.popleft()
        ids = column(result.ids)
        if len(ids) != len(flight.view):
            raise WorkerError(f"step {result.step} sampled {len(flight.view)} rows; its result has {len(ids)} ids")
        view, keep = self._still_standing(flight, result)
        if keep is not None:
            ids = ids[keep]
        self._admission.speed.measured(flight.prefill_tokens, result.device_ns)
        self._admission.thrash.step(len(view))
        self.counts.generated_tokens += len(view)
        if len(view):
            self._apply(flight, view, ids, keep, result, now)
        if flight.bare:
            self._complete_bare(flight, now)

    def _still_standing(self, flight: InFlight, result: StepResult) -> tuple[RowView, Mask | None]:
        """The rows whose result counts, and which those are; None = all."""
        view, rows = flight.view, self._running.rows
        keep: Mask | None = None
        if view.departures != rows.departures:
            keep = rows.generation[view.slots] == view.generations
        if result.statuses:
            bad = column(result.statuses, np.dtype("u1")) != RowStatus.OK
            failed = np.flatnonzero(bad if keep is None else bad & keep)
            keep = ~bad if keep is None else keep & ~bad
            for slot in view.slots[failed].tolist():
                self._fail(slot)
        if keep is None or keep.all():
            return view, None
        self.counts.dropped_rows += len(view) - int(np.count_nonzero(keep))
        return view.only(keep), keep

    def _fail(self, slot: int) -> None:
        """This row's logits are not numbers: the request ends alone, and its pages are not to be shared."""
        request = self._running.rows.requests[slot]
        assert request is not None
        self.counts.failed_rows += 1
        self._running.tree.forget(request.path)
        self._drop(request)
        message = (
            f"the model's logits for output token {self._running.rows.known[slot] - request.prompt_len} are not finite"
        )
        self._reject(request.rid, request.attempt, Refusal(RejectCode.INTERNAL, "", message))

    def _apply(
        self, flight: InFlight, view: RowView, ids: I32Array, keep: Mask | None, result: StepResult, now: int
    ) -> None:
        positions = self._running.rows.take_ids(view.slots, ids)
        out = StepRows(flight.step, view, positions - view.prompt_lens, ids)
        place = None if keep is None else np.cumsum(keep) - 1
        if flight.firsts:
            self._first_ids(flight, out, keep, now)
        if result.logprobs:
            out.logprobs = [
                (row if place is None else int(place[row]), payload)
                for row, payload in result.logprobs
                if keep is None or keep[row]
            ]
        self._ends(out, view, ids, positions)
        self._out.rows(out)

    def _first_ids(self, flight: InFlight, out: StepRows, keep: Mask | None, now: int) -> None:
        place = None if keep is None else np.cumsum(keep) - 1
        for row, request in flight.firsts:
            if keep is not None and place is not None:
                if not keep[row]:
                    continue
                row = int(place[row])
            opening = self._open(request, now)
            if opening is not None:
                out.openings.append((row, *opening))

    def _open(self, request: Request, now: int) -> tuple[bytes, Timing] | None:
        """What goes with a request's first Emit; None afterwards."""
        if request.opened:
            return None
        request.opened = True
        timing = Timing(
            cached_tokens=request.cached_tokens,
            queue=max(request.first_scheduled - request.arrival, 0),
            prefill=max(now - request.first_scheduled, 0),
        )
        return request.opening, timing

    def _ends(self, out: StepRows, view: RowView, ids: I32Array, positions: I32Array) -> None:
        """Find the rows that end with this id, and let them go."""
        full = positions + 1 >= view.max_lens
        watched = self._stops.watched[ids]
        maybe = np.flatnonzero(full | watched)
        if not maybe.size:
            return
        rows, done = self._running.rows, []
        for row in maybe.tolist():
            request = rows.requests[view.slots[row]]
            assert request is not None
            token = int(ids[row])
            if token in request.stops.ids and positions[row] >= request.min_len:
                out.ends.append(End(row, Finish.STOP, token, request.stops.ids[token]))
                self.counts.wasted_rows += int(rows.planned[request.slot]) - int(positions[row])
            elif full[row]:
                out.ends.append(End(row, Finish.LENGTH))
            else:
                continue
            self._admission.lengths.finished(request.work_class, int(positions[row]) + 1 - request.prompt_len)
            done.append(request)
        if done:
            self._finish(done)

    def _complete_bare(self, flight: InFlight, now: int) -> None:
        """Prefill-only requests of this step are done."""
        done = [request for request in flight.bare if request.slot >= 0]
        for request in done:
            self._out.bare(flight.step, BareRow(request, End(0, Finish.LENGTH), self._open(request, now)))
        if done:
            self._finish(done)

    def _finish(self, done: list[Request]) -> None:
        self._running.leave(done, keep=True)
        for request in done:
            self._forget(request)
        self.counts.finished += len(done)
