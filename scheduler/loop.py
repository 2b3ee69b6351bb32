"""The scheduler's process: feeds messages to `Scheduler`, sends the plans and messages that it makes."""

import time
from collections import deque

from engine.runtime.metrics import HistogramRecorder
from engine.runtime.stage import Stage, is_ready, tame_gc
from proto.config import SchedulerOptions
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, StageInfo, StepPlan, StepResult, WorkerFacts, World
from proto.metrics import PLAN_SECONDS, TURNAROUND_SECONDS
from scheduler.core import Scheduler


class WorkerLostError(RuntimeError):
    """A rank of the worker that this scheduler planned for is gone, and its pages with it."""


class SchedulerLoop:
    """Implements `engine.runtime.stage.Handler`. The scheduler is built when all ranks of its worker are ready."""

    def __init__(self, stage: Stage) -> None:
        tame_gc()
        options = stage.options
        assert isinstance(options, SchedulerOptions)
        self._stage = stage
        self._options = options
        self._scheduler: Scheduler | None = None
        self._incarnations: dict[int, int] = {}  # of the worker, by rank
        self._worker = stage.outbox(Address(StageKind.WORKER, stage.address.replica, rank=0))
        self._early: list[Message] = []  # came before the worker was ready
        self._sent_at: deque[int] = deque()  # monotonic ns, of plans whose results are awaited
        self._plan_seconds = HistogramRecorder(PLAN_SECONDS)
        self._turnaround = HistogramRecorder(TURNAROUND_SECONDS)

    def on_message(self, message: Message) -> None:
        if isinstance(message, World):
            self._watch_worker()
        if self._scheduler is None:
            if not isinstance(message, World):
                self._early.append(message)
            return
        now = time.monotonic_ns()
        if isinstance(message, StepResult) and self._sent_at:
            self._turnaround.record((now - self._sent_at.popleft()) / 1e9)
        self._scheduler.on_message(message, now)

    def step(self, now: int) -> float | None:
        """Send plans first; what the last step gave to others waits until they are on their way."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        while (plan := self._timed_plan(scheduler, now)) is not None:
            self._sent_at.append(time.monotonic_ns())
            self._worker.send(plan)
        for to, message in scheduler.outgoing():
            self._stage.outbox(to).send(message)
        due = scheduler.plan_due()
        # If a plan was due and none was made, there is nothing to run until a message comes.
        return None if due is None or due <= now else max(due - time.monotonic_ns(), 0) / 1e9

    def heartbeat(self) -> Heartbeat:
        scheduler = self._scheduler
        if scheduler is None:
            return Heartbeat({})
        histograms = {
            PLAN_SECONDS.name: self._plan_seconds.snapshot(),
            TURNAROUND_SECONDS.name: self._turnaround.snapshot(),
        }
        return Heartbeat(scheduler.counters(), scheduler.running > 0, scheduler.step, histograms)

    def _timed_plan(self, scheduler: Scheduler, now: int) -> StepPlan | None:
        begin = time.perf_counter_ns()
        plan = scheduler.plan(now)
        if plan is not None:
            self._plan_seconds.record((time.perf_counter_ns() - begin) / 1e9)
        return plan

    def _watch_worker(self) -> None:
        replica = self._stage.address.replica
        ranks = {
            info.address.rank: info
            for info in self._stage.world.stages
            if info.address.kind is StageKind.WORKER and info.address.replica == replica
        }
        incarnations = {rank: info.incarnation for rank, info in ranks.items()}
        if self._scheduler is not None:
            if incarnations != self._incarnations:
                raise WorkerLostError(f"a rank of worker {replica} was replaced or has ended")
        elif ranks and all(is_ready(info) for info in ranks.values()):
            self._incarnations = incarnations
            self._begin(ranks[0])

    def _begin(self, worker: StageInfo) -> None:
        """Build the scheduler on what rank 0 of its worker found."""
        assert isinstance(worker.facts, WorkerFacts)
        scheduler = Scheduler(self._options, worker.facts, self._stage.config.incarnation)
        self._worker.send(scheduler.reset)
        now = time.monotonic_ns()
        for message in (self._stage.world, *self._early):
            scheduler.on_message(message, now)
        self._early.clear()
        self._scheduler = scheduler
        self._stage.ready()
