"""Races planted in the device's use of pinned memory and streams: the emulation must catch each."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from proto.messages import StepPlan
from tests.cuda_cases import make_device, plans, play
from tests.flashinfer_double import SimulationError, simulate
from worker.cuda.device import CudaDevice
from worker.cuda.frames import Frames


def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step uses the pinned memory of the one before, whose copies may be on their way."""
    monkeypatch.setattr(Frames, "take", lambda self: _only(self))


def _only(frames: Frames) -> Any:
    frames._free[0].used = 0
    return frames._free[0]


def given_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is free for the next step as soon as its own is launched."""
    take = Frames.take

    def hasty(self: Frames) -> Any:
        frame = take(self)
        self._free.appendleft(frame)
        return frame

    monkeypatch.setattr(Frames, "take", hasty)


def copy_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy back does not wait for the end of its step. (The first wait of each launch is sampling's.)"""
    real = torch.cuda.Stream.wait_event

    def forgetful(self: Any, event: Any) -> None:
        if self is not forgetful.compute:  # type: ignore[attr-defined]
            return
        real(self, event)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", forgetful)


def sample_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step draws while what was drawn before is still being copied."""
    monkeypatch.setattr(CudaDevice, "_read", property(lambda self: None, lambda self, event: None), raising=False)


@cache
def raced() -> tuple[list[StepPlan], list[list[int]]]:
    """Plans, and the ids that are right."""
    script = plans(4, 6)
    with simulate(0) as gpu:
        return script, play(gpu, make_device(max_num_seqs=4), script, depth=1)


PLANTS = [None, no_turns, given_too_early, copy_before_the_step, sample_before_the_copy]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.emulation
def test_planted_races_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of three orders: two random ones, and one in which copies back come as late as they may."""
    script, right = raced()
    caught = 0
    for seed in range(3):
        with simulate(seed) as gpu, monkeypatch.context() as patches:
            device = make_device(max_num_seqs=4)
            if plant is not None:
                plant(patches)
            if plant is copy_before_the_step:
                torch.cuda.Stream.wait_event.compute = device._compute  # type: ignore[attr-defined]
            if seed == 2:
                patches.setattr(gpu.timeline.random, "choice", lambda streams: streams[0])
                patches.setattr(gpu.timeline, "advance", lambda operations: None)
            try:
                caught += play(gpu, device, script) != right
            except (SimulationError, RuntimeError, IndexError):
                caught += 1
    assert (caught > 0) is (plant is not None)
