"""The scheduler: messages in, plans and messages out. No socket and no clock.

Three doors. `on_message` takes what the inbox brought; `plan` makes the next step, if the pipeline has room; and
`outgoing` builds what others are to be told. Between the results of step N and the plan of step N+2 runs only
what that plan depends on: everything else waits in `Outbound` for `outgoing`.
"""

import dataclasses
from array import array
from collections import deque

import numpy as np

from proto.config import SchedulerOptions
from proto.ids import StageKind
from proto.messages import (
    U32,
    U64,
    Abort,
    Admit,
    AdmitRow,
    Census,
    CensusReply,
    Desync,
    Flush,
    FlushReply,
    Message,
    Outgoing,
    Reset,
    StepPlan,
    StepResult,
    WorkerFacts,
    World,
    column,
)
from scheduler.admission import Admission
from scheduler.emit import Outbound
from scheduler.kv_cache import make_cache
from scheduler.lifecycle import Counts, Lifecycle
from scheduler.pages import I32Array
from scheduler.policy import Pacer
from scheduler.prefill import PrefillPlanner
from scheduler.queue import Queues
from scheduler.registry import Registry
from scheduler.request import Request
from scheduler.results import InFlight, Results, WorkerError
from scheduler.rows import Rows, RowView
from scheduler.running import Running


class Scheduler:
    """One replica's queue, batch, pages and prefix tree.

    `epoch` is this scheduler's incarnation; the worker's first message must be `reset`.
    """

    def __init__(self, options: SchedulerOptions, worker: WorkerFacts, epoch: int) -> None:
        self._options = options
        self._epoch = epoch
        self._budget = min(options.max_num_batched_tokens, worker.max_num_batched_tokens)
        # Every running row decodes in every step, so there are no more rows than a step has tokens.
        capacity = min(options.max_num_seqs, worker.max_num_seqs, self._budget)
        max_pages = -(-worker.max_model_len // worker.page_size)
        self._rows = rows = Rows(capacity, max_pages, worker.page_size, worker.max_step_ids)
        self._cache = cache = make_cache(worker, rows, options.prefix_caching)
        self._running = running = Running(rows, cache, speculation=worker.max_step_ids > 1)
        self._queues = Queues()
        self._registry = Registry()
        self._out = Outbound()
        self._admission = Admission(options, worker, cache, running, self._budget)
        self._lifecycle = Lifecycle(
            rows, cache, running, self._queues, self._registry, self._admission, self._out, worker.vocab_size
        )
        self._prefill = PrefillPlanner(rows, running, self._queues, self._admission, self._lifecycle)
        self._results = Results(rows, cache, self._lifecycle, self._admission, self._out)
        self._flight: deque[InFlight] = deque()
        self._pacer = Pacer()
        self._detokenizers = 1
        self._step = 0
        self._sent_version = 0  # of the rows that decoded in the last plan
        self._forced_at = 0  # step of the last forced preemption
        self._forced_slot = -1

    @property
    def reset(self) -> Reset:
        return Reset(epoch=self._epoch)

    @property
    def in_flight(self) -> int:
        """Steps planned whose results have not come."""
        return len(self._flight)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._rows.count

    @property
    def step(self) -> int:
        """Number of the last step planned."""
        return self._step

    @property
    def counts(self) -> Counts:
        return self._lifecycle.counts

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
                pages = self._cache.flush()
                self._out.send_to_server(message.rid, FlushReply(rid=message.rid, pages=pages))
            case World():
                self._on_world(message)
            case Desync():
                raise WorkerError(
                    f"the worker refuses plan {message.step} of epoch {message.epoch}: it is at epoch "
                    f"{message.expected_epoch}, step {message.expected_previous}"
                )

    def plan_due(self) -> int | None:
        """Monotonic ns from when on `plan` makes the next step; 0 = at once, None = only a message can bring it on.

        The plan that fills the pipeline waits until the running step is about to end, so that depth adds no
        latency to admissions and aborts.
        """
        in_flight, depth = len(self._flight), self._options.pipeline_depth
        if in_flight >= depth:
            return None
        return self._pacer.due if 0 < in_flight == depth - 1 else 0

    def plan(self, now: int) -> StepPlan | None:
        """The next step; None when it is not due yet or there is nothing to run."""
        due = self.plan_due()
        if due is None or now < due:
            return None
        self._lifecycle.expire(now)
        self._cache.slide_requests(self._running.prefills)
        forced = self._options.debug_preempt_every > 0 and self._force_preemption()
        view, limits, preempted = self._plan_decodes()
        chunks: dict[Request, int] = {}
        admits: list[AdmitRow] = []
        if self._running.prefills or self._queues.count:
            # Who was just preempted must not come straight back, unless nothing else would run.
            may_admit = not (forced or preempted) or not (view.count or self._flight)
            # Without chunked prefill a prompt may need the whole step: then decodes pause for one.
            paused = self._prefill.cramped and may_admit
            budget = self._budget if paused else self._budget - (view.count if limits is None else int(limits.sum()))
            share = self._prefill.share(budget, self._step, may_admit, now)
            chunks, admits = share.chunks, share.admits
            if paused and chunks:
                view, limits = self._rows.view(view.slots[:0]), None
        if not view.count and not chunks:
            return self._plan_with_fewer(now) if self._running.prefills and not self._flight else None
        plan = self._issue(view, limits, chunks, admits)
        if len(self._flight) == 1:
            self._pacer.start_step(self._flight[0].prefill_tokens, now)
        return plan

    def outgoing(self) -> list[Outgoing]:
        """What detokenizers and servers are to be told since the last call, in order."""
        return self._out.build(self._detokenizers)

    def counters(self) -> dict[str, float]:
        """For the heartbeat."""
        thrash = self._admission.thrash
        totals = dataclasses.asdict(self.counts)
        return {
            "running": float(self._rows.count),
            "waiting": float(self._queues.count),
            "waiting_tokens": float(self._queues.tokens),
            "steps": float(self._step),
            **self._cache.counters(),
            "preempted_tokens": float(thrash.preempted_tokens),
            "thrash": thrash.ratio,
            "throttled_pages": float(thrash.headroom(self._cache.counted_pool.num_pages)),
            "prefill_tokens_per_second": self._admission.speed.tokens_per_second,
            **{name: float(total) for name, total in totals.items()},
        }

    # ---------------------------------------------------------------- messages

    def _on_result(self, result: StepResult, now: int) -> None:
        if result.epoch != self._epoch:
            self.counts.stale_results += 1
            return
        if not self._flight or self._flight[0].step != result.step:
            awaited = self._flight[0].step if self._flight else "none"
            raise WorkerError(f"result of step {result.step}; awaited: {awaited}")
        flight = self._flight.popleft()
        self._pacer.observe(flight.prefill_tokens, result.device_ns)
        if self._flight:
            self._pacer.start_step(self._flight[0].prefill_tokens, now)
        self._results.apply(flight, result, now)

    def _on_admit(self, admit: Admit, now: int) -> None:
        rid, attempt = admit.rid, admit.attempt
        present = self._registry.requests.get(rid)
        if (
            self._registry.has_tombstone(rid, attempt)
            or self._registry.is_disowned(rid)
            or (present is not None and attempt <= present.attempt)
        ):
            self.counts.ignored_admits += 1
            return
        if present is not None:
            self.counts.superseded += 1
            self._lifecycle.drop(present)
        self._lifecycle.admit(admit, rid % self._detokenizers, self._step, now)

    def _on_abort(self, abort: Abort) -> None:
        for rid, attempt in zip(column(abort.rids, U64).tolist(), column(abort.attempts, U32).tolist(), strict=True):
            self._registry.add_tombstone(rid, attempt)
            request = self._registry.requests.get(rid)
            if request is not None and request.attempt <= attempt:
                self.counts.aborted += 1
                self._lifecycle.drop(request)

    def _on_census(self, census: Census, now: int) -> None:
        unknown, leaked = self._registry.census(census, now)
        for request in leaked:
            self.counts.leaked += 1
            self._lifecycle.drop(request)
        if unknown:
            rids, attempts = zip(*unknown, strict=True)
            reply = CensusReply(rids=np.array(rids, U64).tobytes(), attempts=np.array(attempts, U32).tobytes())
            self._out.send_to_server(rids[0], reply)

    def _on_world(self, world: World) -> None:
        detokenizers = sum(info.address.kind is StageKind.DETOKENIZER for info in world.stages)
        self._detokenizers = max(self._detokenizers, detokenizers)
        for request in self._registry.adopt_world(world):
            self.counts.aborted += 1
            self._lifecycle.drop(request)

    def _plan_with_fewer(self, now: int) -> StepPlan | None:
        """Prefills hold all pages of layers behind windows, and none can go on: the newest makes way."""
        self._lifecycle.preempt(self._running.prefills[-1])
        return self.plan(now)

    # ---------------------------------------------------------------- plan: decode rows

    def _plan_decodes(self) -> tuple[RowView, I32Array | None, bool]:
        """Rows to decode, ids that each may gain (None: one), and whether others had to be preempted for it."""
        running, preempted = self._running, False
        while True:
            view = running.decodable_view()
            # Half of a step is left to prefills.
            limits = running.step_limits(view, self._budget // 2) if running.speculation else None
            needy = running.lacking_pages(view, limits)
            if needy.size > self._cache.available and limits is not None:
                # Speculation takes no page from anybody.
                limits = None
                needy = running.lacking_pages(view, None)
            if needy.size <= self._cache.available:
                break
            victim = running.victim()
            if victim is None:
                # Rows have ids in flight; once they are known there is someone to preempt.
                view, needy = running.stall(view, needy)
                self.counts.stalled_steps += 1
                break
            self._lifecycle.preempt(victim)
            preempted = True
        if needy.size:
            self._cache.append_pages(needy, repeated=limits is not None)
        return view, limits, preempted

    def _force_preemption(self) -> bool:
        """For debugging: every so many steps some eligible row must go, one slot after another."""
        every = self._options.debug_preempt_every
        step = self._step + 1
        if step % every or self._forced_at == step:
            return False
        self._forced_at = step
        eligible = self._running.preemptible()
        if not eligible:
            return False
        request = next((r for r in eligible if r.slot > self._forced_slot), eligible[0])
        self._forced_slot = request.slot
        self._lifecycle.preempt(request)
        return True

    # ---------------------------------------------------------------- plan: the message

    def _issue(
        self,
        view: RowView,
        limits: I32Array | None,
        chunks: dict[Request, int],
        admits: list[AdmitRow],
    ) -> StepPlan:
        """Account the step as planned and write it down."""
        running = self._running
        append_slots, append_pages, append_groups = self._cache.drain_appended()
        rewinds = self._rows.drain_rewinds(view) if running.speculation else b""
        decode_slots = None if view.version == self._sent_version else view.slots.tobytes()
        self._sent_version = view.version
        if view.count:
            running.decoded(view, limits)
        flight = InFlight(self._step + 1, view, limits, [], [], 0)
        packed = self._finish_chunks(flight, chunks) if chunks else b""
        self._flight.append(flight)
        self._step += 1
        return StepPlan(
            epoch=self._epoch,
            step=self._step,
            previous=self._step - 1,
            released=running.drain_released(),
            admits=tuple(admits),
            append_slots=append_slots,
            append_pages=append_pages,
            append_groups=append_groups,
            rewinds=rewinds,
            decode_slots=decode_slots,
            limits=b"" if limits is None else limits.tobytes(),
            chunks=packed,
        )

    def _finish_chunks(self, flight: InFlight, chunks: dict[Request, int]) -> bytes:
        """Rows of the chunks; those that complete their prompt sample, and decode from the next step on."""
        packed: list[int] = []
        sampling: list[Request] = []
        row = flight.view.count
        for request, tokens in chunks.items():
            flight.prefill_tokens += tokens
            if request.done < request.tokens:
                packed += (request.slot, tokens, 0)
            elif request.prefill_only:
                packed += (request.slot, tokens, 0)
                flight.bare.append(request)
            else:
                packed += (request.slot, tokens, 1)
                flight.firsts.append((row, request))
                sampling.append(request)
                row += 1
        if sampling:
            flight.view = self._running.start_decoding(flight.view, sampling)
        self.counts.prefill_tokens += flight.prefill_tokens
        return array("i", packed).tobytes()
