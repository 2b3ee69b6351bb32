"""A device on a virtual clock for the scheduler: steps take the time that their tokens cost."""

import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from proto.ids import StageKind
from proto.messages import U64, Admit, Emit, StepPlan, StepResult, column
from scheduler.core import Scheduler

SECOND = 1_000_000_000
_NEVER = 1 << 62


@dataclass(frozen=True)
class Device:
    """Costs of a step in ns."""

    launch: int = 4_000_000
    prefill_token: int = 33_000
    decode_row: int = 2_000
    host: int = 0  # from a result to its successor's arrival at the device


class Simulation:
    """Open-loop arrivals against a scheduler; plans queue on the device as on a stream."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.now = 1
        self.first: dict[int, int] = {}  # rid → ns of its first token
        self.last: dict[int, int] = {}
        self.gaps: list[int] = []  # ns between tokens of a request
        self.longest_step = 0
        self.busy = self.idle = 0  # ns; idle: waiting for a plan while rows decode
        self._random = random.Random(3)
        self._free_at = 0
        self._decodes = 0
        self._results: deque[tuple[int, StepResult]] = deque()

    def run(self, arrivals: list[Admit]) -> None:
        """Play all arrivals (by their `arrival`) to their ends."""
        waiting = deque(sorted(arrivals, key=lambda admit: admit.arrival))
        while waiting or self._results or self.scheduler.counters()["running"]:
            result_at = self._results[0][0] if self._results else _NEVER
            plan_at = self.scheduler.plan_due() or _NEVER
            arrival_at = waiting[0].arrival if waiting else _NEVER
            if self.now < plan_at < min(result_at, arrival_at):
                self.now = plan_at
            elif arrival_at <= result_at:
                admit = waiting.popleft()
                self.now = max(self.now, admit.arrival)
                self.scheduler.on_message(admit, self.now)
            else:
                self.now, result = self._results.popleft()
                self.scheduler.on_message(result, self.now)
            while (plan := self.scheduler.plan(self.now)) is not None:
                self._launch(plan)
            self._collect()

    def _launch(self, plan: StepPlan) -> None:
        if plan.decode_slots is not None:
            self._decodes = len(column(plan.decode_slots))
        chunks = column(plan.chunks).reshape(-1, 3)
        sampled = self._decodes + int(chunks[:, 2].sum())
        device = self.device
        duration = device.launch + device.prefill_token * int(chunks[:, 1].sum()) + device.decode_row * self._decodes
        self.longest_step = max(self.longest_step, duration)
        arrives = self.now + device.host
        self.idle += max(arrives - self._free_at, 0) if self._decodes else 0
        self.busy += duration
        self._free_at = max(arrives, self._free_at) + duration
        ids = np.full(sampled, self._random.randrange(100), np.int32)
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            ids=ids.tobytes(),
            counts=b"",
            statuses=b"",
            logprobs=(),
            device_ns=duration,
            idle_ns=0,
        )
        self._results.append((self._free_at, result))

    def _collect(self) -> None:
        for to, message in self.scheduler.outgoing():
            assert to.kind is StageKind.DETOKENIZER, message
            assert isinstance(message, Emit)
            for rid in column(message.rids, U64).tolist():
                if rid in self.last:
                    self.gaps.append(self.now - self.last[rid])
                self.first.setdefault(rid, self.now)
                self.last[rid] = self.now
