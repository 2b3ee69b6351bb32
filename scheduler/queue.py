"""Waiting requests: three classes of work that share prefill by weight and age.

Between classes: start-time fair queueing (Goyal et al. 1996) over prefilled tokens, with a credit for the
age of a class's oldest request. Within a class: by arrival, where a level of priority is worth a fixed wait,
so that low priorities come late but come. Long prefills have a lane of their own in each class: they wait for each
other, and short ones pass them by.
"""

import heapq
import math

from proto.messages import WorkClass
from scheduler.request import Request

_WEIGHTS = [8.0, 4.0, 1.0]  # by WorkClass; lists, for hashing an enum member is slow
AGE_CREDIT = 200.0  # weighted tokens per second of waiting
PRIORITY_NS = 10_000_000_000  # one level of priority is worth ten seconds of waiting
_MAX_PASSED = 4  # requests of a lane that one scan passes by
_COMPACT_SLACK = 64

Entry = tuple[int, int, Request]  # (virtual arrival, ticket, request)


class Lane:
    """A heap of waiting requests. Removal is lazy: an entry counts while the request holds its ticket."""

    def __init__(self) -> None:
        self.heap: list[Entry] = []
        self._stale = 0
        self._passed: list[Entry] = []  # in the scan that goes on

    def add(self, request: Request) -> None:
        heapq.heappush(self.heap, (request.order, request.ticket, request))

    def head(self) -> Request | None:
        if len(self._passed) >= _MAX_PASSED:
            return None
        heap = self.heap
        while heap:
            _, ticket, request = heap[0]
            if request.ticket == ticket:
                return request
            heapq.heappop(heap)
            self._stale -= 1
        return None

    def pass_by(self) -> None:
        self._passed.append(heapq.heappop(self.heap))

    def end_scan(self) -> None:
        while self._passed:
            heapq.heappush(self.heap, self._passed.pop())

    def mark_stale(self) -> None:
        """Count an entry that has become stale."""
        self._stale += 1
        if self._stale > len(self.heap) // 2 + _COMPACT_SLACK:
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapq.heapify(self.heap)
            self._stale = 0


class Queues:
    """All waiting requests. A *scan* walks the heads, best first, and takes some and passes others by."""

    def __init__(self) -> None:
        self._lanes = [(Lane(), Lane()) for _ in WorkClass]  # short and long
        self._waiting = [0] * len(WorkClass)
        self._served = [0.0] * len(WorkClass)  # weighted tokens: each class's virtual time
        self._virtual_now = 0.0
        self.count = 0  # waiting requests
        self.tickets = 0  # requests queued so far
        self.tokens = 0  # ids of all waiting requests

    def enqueue(self, request: Request) -> None:
        """Queue a new or preempted request; a preempted one keeps the place of its arrival."""
        work_class = request.work_class
        if not self._waiting[work_class]:
            # A class that was away does not come back with credit for its absence.
            self._served[work_class] = max(self._served[work_class], self._virtual_now)
        self.tickets += 1
        request.queue(self.tickets, request.arrival - request.priority * PRIORITY_NS)
        self._waiting[work_class] += 1
        self.count += 1
        self.tokens += request.tokens
        self._lane(request).add(request)

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it waits."""
        self._forget(request)
        self._lane(request).mark_stale()

    def account_prefill(self, work_class: int, tokens: int) -> None:
        """Charge prefilled tokens to a class."""
        self._served[work_class] += tokens / _WEIGHTS[work_class]

    def rank(self, work_class: int, oldest: int, now: int) -> float:
        """Return a class's rank; the lowest is served next. `oldest` is the arrival of its oldest request."""
        return self._served[work_class] - AGE_CREDIT * max(now - oldest, 0) / 1e9

    def best(self, now: int) -> Request | None:
        """Return the head to look at next, among those not yet passed by in this scan."""
        best: Request | None = None
        best_rank = math.inf
        for work_class, (short, long) in enumerate(self._lanes):
            waiting = self._waiting[work_class]
            if not waiting:
                continue
            head = short.head() if short.heap else None
            other = long.head() if long.heap else None
            if head is None or (other is not None and (other.order, other.ticket) < (head.order, head.ticket)):
                head = other
            if head is None:
                continue
            if waiting == self.count:
                return head
            rank = self.rank(work_class, head.arrival, now)
            if rank < best_rank:
                best, best_rank = head, rank
        return best

    def pop_best(self, request: Request) -> None:
        """Remove the best head, which gets a slot."""
        heapq.heappop(self._lane(request).heap)
        self._forget(request)
        served = self._served[request.work_class]
        if served > self._virtual_now:
            self._virtual_now = served

    def pass_by(self, request: Request) -> None:
        """Leave the best head in place and go on behind it."""
        self._lane(request).pass_by()

    def end_scan(self) -> None:
        for short, long in self._lanes:
            short.end_scan()
            long.end_scan()

    def _lane(self, request: Request) -> Lane:
        return self._lanes[request.work_class][request.long]

    def _forget(self, request: Request) -> None:
        request.dequeue()
        self._waiting[request.work_class] -= 1
        self.count -= 1
        self.tokens -= request.tokens
