"""A request's way through its states, and its one end.

    admit ─►  QUEUED ─► PREFILL ─► DECODE ─► ended: finish | refuse | drop
                ▲                    │
                └──── preempt ───────┘

Placement and the steps in a slot are `Running`'s; which of these moves is made when, is decided elsewhere.
"""

import heapq
from dataclasses import dataclass

from proto.messages import ID_BYTES, Admit, Finish, Reject, Timing
from scheduler.admission import Admission, Refusal
from scheduler.emit import BareRow, End, Outbound
from scheduler.kv_cache import KvCache
from scheduler.prefix import Path
from scheduler.queue import Queues
from scheduler.registry import Registry
from scheduler.request import Request, State
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.stops import StopTable

_STALE_DEADLINES = 1024  # entries of requests that wait no longer, kept beside those that do


@dataclass(slots=True)
class Counts:
    """Totals since the start, named as in the heartbeat."""

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
    stalled_steps: int = 0  # in which a row got no page and nobody could be preempted
    stale_results: int = 0


class Lifecycle:
    """The only place where requests come into being, change state outside a slot, and end."""

    def __init__(
        self,
        rows: Rows,
        cache: KvCache,
        running: Running,
        queues: Queues,
        registry: Registry,
        admission: Admission,
        out: Outbound,
        vocab_size: int,
    ) -> None:
        self.counts = Counts()
        self.stops = StopTable(vocab_size)
        self._rows = rows
        self._cache = cache
        self._running = running
        self._queues = queues
        self._registry = registry
        self._admission = admission
        self._out = out
        self._deadlines: list[tuple[int, int, int]] = []  # (deadline, rid, attempt) of requests that may wait

    # ---------------------------------------------------------------- in

    def admit(self, admit: Admit, detokenizer: int, step: int, now: int) -> None:
        """Queue a request, or refuse it, or report the end of one that has all its output already."""
        refusal = self._admission.never(admit) or self._admission.queue_full(self._queues.count, self._queues.tokens)
        if refusal is not None:
            self.reject(admit.rid, admit.attempt, refusal)
            return
        request = self._make_request(admit, detokenizer, now)
        end = _end_of_output(request)
        if end is not None:
            request.note_placement(now, 0, long=False)
            self._out.add_bare(step, BareRow(request, end, self.first_opening(request, now)))
            self.counts.finished += 1
            return
        uncached = self._cache.match(request)
        refusal = self._admission.late(request, now)
        if refusal is not None:
            self.reject(request.rid, request.attempt, refusal)
            return
        self._registry.requests[request.rid] = request
        self.stops.acquire(request.stops)
        self._enqueue(request, uncached)

    def _make_request(self, admit: Admit, detokenizer: int, now: int) -> Request:
        prompt_len = len(admit.prompt_ids) // ID_BYTES
        return Request(
            rid=admit.rid,
            attempt=admit.attempt,
            ids=admit.prompt_ids + admit.output_ids,
            tokens=prompt_len + len(admit.output_ids) // ID_BYTES,
            prompt_len=prompt_len,
            max_len=prompt_len + admit.max_new_tokens,
            min_len=prompt_len + admit.min_new_tokens,
            sampling=admit.sampling,
            stop_ids=admit.stop_ids,
            stops=self.stops.find(admit.stop_ids, admit.num_eos),
            work_class=admit.work_class,
            priority=admit.priority,
            deadline=admit.deadline,
            arrival=admit.arrival or now,
            opening=admit.opening,
            detokenizer=detokenizer,
            path=Path(admit.cache_salt),
            seen=now,
        )

    def _enqueue(self, request: Request, uncached: int) -> None:
        request.set_long(self._admission.is_long(uncached))
        self._queues.enqueue(request)
        if request.deadline:
            if len(self._deadlines) > 2 * self._queues.count + _STALE_DEADLINES:
                self._deadlines = [entry for entry in self._deadlines if self._waits(*entry[1:]) is not None]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.rid, request.attempt))

    def preempt(self, request: Request) -> None:
        """Send a request back to the queue with all its known ids; results in flight for it will be dropped."""
        request.adopt_ids(self._rows.known_ids(request.slot))
        # What a prefill has planned is in the tree already.
        self._running.release_slots([request], keep=request.state is State.DECODE)
        request.count_preemption()
        self._enqueue(request, self._cache.match(request))
        self.counts.preemptions += 1
        self._admission.lengths.observe_preemption()

    def first_opening(self, request: Request, now: int) -> tuple[bytes, Timing] | None:
        """Return what goes with a request's first Emit; None afterwards."""
        if request.opened:
            return None
        request.mark_opened()
        timing = Timing(
            cached_tokens=request.cached_tokens,
            queue=max(request.first_scheduled - request.arrival, 0),
            prefill=max(now - request.first_scheduled, 0),
        )
        return request.opening, timing

    # ---------------------------------------------------------------- out

    def finish(self, done: list[Request]) -> None:
        """Release the slots and pages of requests whose ends are on their way to the detokenizers."""
        self._running.release_slots(done, keep=True)
        for request in done:
            self._forget(request)
        self.counts.finished += len(done)

    def drop(self, request: Request) -> None:
        """Free all that a request holds, whatever its state; nobody waits for its end."""
        if request.ticket:
            self._queues.remove(request)
        elif request.slot >= 0:
            self._running.release_slots([request], keep=False)
        if request.opened:
            self._out.close(request)
        self._forget(request)

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """End an accepted request with a Reject."""
        self.drop(request)
        self.reject(request.rid, request.attempt, refusal)

    def reject(self, rid: int, attempt: int, refusal: Refusal) -> None:
        self.counts.rejected += 1
        reject = Reject(
            rid=rid,
            attempt=attempt,
            code=refusal.code,
            field=refusal.field,
            message=refusal.message,
            retry_after_ms=refusal.retry_after_ms,
        )
        self._out.send_to_server(rid, reject)

    def expire(self, now: int) -> None:
        """Refuse waiting requests whose deadline has passed. Running ones are left to the server to abort."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._waits(*heapq.heappop(self._deadlines)[1:])
            if request is None:
                continue
            refusal = self._admission.late(request, now)
            assert refusal is not None
            self.refuse(request, refusal)

    def _waits(self, rid: int, attempt: int) -> Request | None:
        """Return the request if it is in the queue."""
        request = self._registry.requests.get(rid)
        return request if request is not None and request.attempt == attempt and request.ticket else None

    def _forget(self, request: Request) -> None:
        request.end()
        self.stops.release(request.stops)
        del self._registry.requests[request.rid]


def _end_of_output(request: Request) -> End | None:
    """Return the end of a continuation that has all its output already, when only its end was lost."""
    if not request.resumed:
        return None
    last = int.from_bytes(request.ids[-ID_BYTES:], "little")
    if last in request.stops.ids and request.tokens > request.min_len:
        return End(0, Finish.STOP, last, request.stops.ids[last])
    return End(0, Finish.LENGTH) if request.tokens >= request.max_len else None
