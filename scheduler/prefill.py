"""Who prefills in a step: how the tokens that decodes leave are shared."""

from proto.messages import AdmitRow
from scheduler.admission import Admission
from scheduler.lifecycle import Lifecycle
from scheduler.policy import Obstacle
from scheduler.queue import Queues
from scheduler.request import Request
from scheduler.rows import Rows
from scheduler.running import Running

_LONG_SHARE = 4  # a long prefill gets at least 1/4 of what decodes leave, however many short ones come
_MAX_OVERTAKES = 64  # requests that may pass one which waits for pages; then all wait for it
_RESCAN_STEPS = 32  # steps after which a queue that found no pages is looked at again in any case


class PrefillShare:
    """The prefill of one step."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.chunks: dict[Request, int] = {}  # ids to prefill, in plan order
        self.admits: list[AdmitRow] = []


class PrefillPlanner:
    """Shares each step between prefills that run and requests that wait.

    First a part for the long prefill whose turn it is, then short ones, then the queue, then the long ones again:
    so neither can starve the other, and nothing is left unused.
    """

    def __init__(
        self, rows: Rows, running: Running, queues: Queues, admission: Admission, lifecycle: Lifecycle
    ) -> None:
        self._rows = rows
        self._running = running
        self._queues = queues
        self._admission = admission
        self._lifecycle = lifecycle
        self._stuck: tuple[int, int, int, int] | None = None  # see `_nothing_new`
        self.cramped = False  # decodes left a prompt that must run in one step too little room

    def share(self, budget: int, step: int, may_admit: bool, now: int) -> PrefillShare:
        """Plan the prefill of one step, at most `budget` tokens."""
        share = PrefillShare(budget)
        self.cramped = False
        longs = [request for request in self._running.prefills if request.long]
        longs.sort(key=lambda request: self._queues.rank(request.work_class, request.arrival, now))
        shorts = [request for request in self._running.prefills if not request.long]
        if longs and (shorts or self._queues.count):
            self._advance(longs[0], budget // _LONG_SHARE, share)
        for request in shorts:
            self._advance(request, share.budget, share)
        stuck = self._stuck is not None and self._stuck == self._circumstances(step)
        if may_admit and share.budget and self._queues.count and not stuck:
            self._admit(share, step, now)
        for request in longs:
            self._advance(request, share.budget, share)
        return share

    def _advance(self, request: Request, budget: int, share: PrefillShare) -> None:
        """Plan as much of a prefill as the budget holds."""
        tokens = min(budget, request.tokens - request.done)
        if tokens and (tokens := self._running.advance(request, tokens)):
            share.chunks[request] = share.chunks.get(request, 0) + tokens
            share.budget -= tokens
            self._queues.account_prefill(request.work_class, tokens)

    def _admit(self, share: PrefillShare, step: int, now: int) -> None:
        """Place waiting requests while there are slots, pages and budget."""
        queues, slots = self._queues, self._rows.free
        blocked: list[Request] = []
        while share.budget and slots:
            request = queues.best(now)
            if request is None:
                break
            obstacle = self._admission.obstacle(request, share.budget, now)
            if obstacle is None:
                queues.pop_best(request)
                self._place(request, share, now)
                for other in blocked:
                    other.count_overtake()
                continue
            if obstacle is Obstacle.LATE or obstacle is Obstacle.PINNED:
                refusal = self._admission.late(request, now) if obstacle is Obstacle.LATE else None
                self._lifecycle.refuse(request, refusal or self._admission.pinned(request))
                continue
            if obstacle is Obstacle.PAGES:
                if request.overtaken >= _MAX_OVERTAKES:
                    break
                blocked.append(request)
            elif obstacle is Obstacle.BUDGET and not share.chunks:
                self.cramped = True
            queues.pass_by(request)
        queues.end_scan()
        self._stuck = self._circumstances(step) if blocked and not share.admits else None

    def _circumstances(self, step: int) -> tuple[int, int, int, int]:
        """Return what must change before a scan that failed for want of pages can succeed."""
        return self._rows.departures, self._queues.tickets, len(self._running.prefills), step // _RESCAN_STEPS

    def _place(self, request: Request, share: PrefillShare, now: int) -> None:
        admission, counts = self._admission, self._lifecycle.counts
        row = self._running.place(request, share.budget)
        share.admits.append(row)
        share.chunks[request] = tokens = request.done - row.start
        share.budget -= tokens
        self._queues.account_prefill(request.work_class, tokens)
        request.note_placement(now, row.start, admission.is_long(request.tokens - row.start))
        counts.prefix_query_tokens += request.tokens
        counts.prefix_hit_tokens += row.start
        if request.preemptions:
            admission.thrash.observe_recompute(request.tokens - row.start - 1)
