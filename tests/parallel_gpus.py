"""Ranks with a simulated GPU each, and what tests have them do (`tests.parallel_ranks.Ranks`).

What crosses between devices crosses by gloo, when each device gets there: late, and at another time on each rank.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from proto.config import WorkerOptions
from proto.messages import StepPlan, StepResult, column
from scripts.gpu import ranks
from tests.flashinfer_cases import DOUBLE
from tests.flashinfer_double import simulate
from tests.flashinfer_double.memory import DeviceTensor, queue
from worker.cuda.group import DeviceGroup, Nccl
from worker.cuda.sampling import sample
from worker.cuda.start import start
from worker.device import Deferred
from worker.ranks.group import Group

Call = tuple[str, torch.dtype, tuple[int, ...]]  # operation, and what it was given


class LateGloo:
    """`worker.cuda.group.Collectives`. A graph that captured a call makes it again at each replay."""

    def __init__(self, size: int) -> None:
        self.asked: list[Call] = []  # by the host: launched, or captured
        self.done: list[Call] = []  # by the device
        self._size = size
        self._pair = dist.new_group()  # not the host's, which do not wait for devices

    def add(self, x: torch.Tensor) -> None:
        self._queue("add", x, lambda raw: dist.all_reduce(raw, group=self._pair))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty(self._size, *x.shape)
        assert isinstance(parts, DeviceTensor)
        into = list(parts.raw.unbind())
        self._queue("gather", x, lambda raw: dist.all_gather(into, raw, group=self._pair), parts)
        return parts

    def send_from_0(self, x: torch.Tensor) -> None:
        self._queue("send from 0", x, lambda raw: dist.broadcast(raw, src=0, group=self._pair))

    def _queue(
        self, name: str, x: torch.Tensor, exchange: Callable[[torch.Tensor], object], *others: torch.Tensor
    ) -> None:
        assert isinstance(x, DeviceTensor)
        assert x.is_contiguous()
        raw, call = x.raw, (name, x.dtype, tuple(x.shape))
        self.asked.append(call)

        def work() -> None:
            self.done.append(call)
            exchange(raw)

        queue(name, work, [x, *others])


@dataclass
class Played:
    """What a rank saw."""

    ids: list[list[int]] = field(default_factory=list)  # of each step
    started: list[Call] = field(default_factory=list)  # until the device was ready
    asked: list[list[Call]] = field(default_factory=list)  # in each step, outside graphs
    done: list[Call] = field(default_factory=list)  # since the device was ready
    replays: list[int] = field(default_factory=list)  # graphs, of each step
    pages: int = 0
    kv_bytes_per_token: int = 0


def play(
    group: Group, options: WorkerOptions, plans: Sequence[StepPlan], stray: bool = False, depth: int = 2
) -> Played:
    """Steps with `depth` of them in flight.

    `stray`: a rank that is not rank 0 draws id 1 and nothing else, and holds other graphs for worth capturing.
    """
    found = Played()
    with simulate(seed=10 + group.rank) as gpu:
        collectives = LateGloo(group.size)
        devices = DeviceGroup(group, collectives, deterministic=options.deterministic)
        with ExitStack() as patches:
            if stray and group.rank:
                patches.enter_context(mock.patch("worker.cuda.step.sample", _astray))
                patches.enter_context(mock.patch("worker.cuda.start.busy_tokens", return_value=300))
            device = start(options, lambda text, done, total: None, devices)
        torch.cuda.synchronize()
        found.pages, found.kv_bytes_per_token = device.facts.num_pages, device.facts.kv_bytes_per_token
        found.started, collectives.asked, collectives.done = collectives.asked, [], found.done
        device.reset(1)
        flight: list[Deferred] = []
        for plan in plans:
            if len(flight) == depth:
                _settle(found, flight)
            with gpu.timeline.launch_path() as account:
                answer = device.launch(plan)
            assert isinstance(answer, Deferred)
            assert account.waits == []
            flight.append(answer)
            found.asked.append(collectives.asked)
            found.replays.append(len(account.replays))
            collectives.asked = []
            gpu.timeline.advance(gpu.timeline.random.randrange(60))
        while flight:
            _settle(found, flight)
    return found


def exchange(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Nccl`'s calls of torch.distributed, which gloo takes as well, with tensors on the host."""
    collectives = Nccl(group.size)
    summed = torch.arange(6.0).view(2, 3) * (group.rank + 1)
    gathered = collectives.gather(summed)
    collectives.add(summed)
    sent = torch.full((2, 2), group.rank + 5, dtype=torch.int32)
    collectives.send_from_0(sent)
    return summed, gathered, sent


def kit_logits(group: Group, deterministic: bool) -> npt.NDArray[np.float32]:
    """What scripts/gpu/check compares where there are two GPUs."""
    with simulate(seed=20 + group.rank):
        devices = DeviceGroup(group, LateGloo(group.size), deterministic=deterministic)
        return ranks.logits(DOUBLE, deterministic, devices)


def _settle(found: Played, flight: list[Deferred]) -> None:
    result = flight.pop(0).wait()
    assert isinstance(result, StepResult)
    found.ids.append(column(result.ids).tolist())


def _astray(*arguments: Any) -> torch.Tensor:
    drawn = sample(*arguments)
    return drawn.mul(0).add_(torch.ones_like(drawn))
