"""Scheduler and simulated device on one virtual clock: what pipeline depth is for."""

from collections import deque

import numpy as np
import pytest

from proto.messages import Admit, StepResult
from scheduler.core import Scheduler
from tests.builders import GREEDY, make_scheduler_options, make_worker_options
from tests.test_worker_simulated import LLAMA_8B
from worker.device import Completion
from worker.sim.device import SimulatedDevice

HOST_NS = 150_000  # from a result to the next plan's launch: two hops and the scheduler's own work
ROWS = 32
TOKENS = 200


class Clock:
    """Virtual monotonic ns."""

    now = 1_000_000


def play(depth: int) -> SimulatedDevice:
    """All rows from prompt to end, the host taking its time before every launch."""
    clock = Clock()
    options = make_worker_options(
        LLAMA_8B, device="sim:h200", page_size=16, max_num_seqs=ROWS, max_num_batched_tokens=2048
    )
    device = SimulatedDevice(options, clock_ns=lambda: clock.now)
    scheduler = Scheduler(
        make_scheduler_options(pipeline_depth=depth, max_num_batched_tokens=2048, max_num_seqs=ROWS),
        device.facts,
        epoch=1,
    )
    device.reset(scheduler.reset.epoch)
    prompts = np.random.default_rng(0).integers(0, LLAMA_8B.vocab_size, (ROWS, 512), dtype=np.int32)
    for rid, prompt in enumerate(prompts, 1):
        scheduler.on_message(
            Admit(
                rid=rid,
                attempt=1,
                prompt_ids=prompt.tobytes(),
                sampling=GREEDY,
                max_new_tokens=TOKENS,
                arrival=clock.now,
            ),
            clock.now,
        )
    flight: deque[Completion] = deque()
    while True:
        due = scheduler.plan_due()
        if due is not None and (not flight or due < flight[0].due):
            clock.now = max(clock.now, due)
            plan = scheduler.plan(clock.now)
            if plan is not None:
                clock.now += HOST_NS
                completion = device.launch(plan)
                assert completion is not None
                flight.append(completion)
                continue
        if not flight:
            return device
        done = flight.popleft()
        clock.now = max(clock.now, done.due)
        assert isinstance(done.message, StepResult)
        scheduler.on_message(done.message, clock.now)
        scheduler.outgoing()


def test_depth_two_hides_the_host_and_depth_one_shows_it() -> None:
    device = play(depth=2)
    assert device.clock.tokens == ROWS * TOKENS
    assert device.clock.counters()["device_busy_share"] > 0.995
    alone = play(depth=1)
    assert alone.clock.tokens == ROWS * TOKENS
    steps, busy = alone.clock.steps, alone.clock.busy_ns
    assert alone.clock.counters()["device_busy_share"] == pytest.approx(busy / (busy + (steps - 1) * HOST_NS), rel=1e-3)
    assert alone.clock.counters()["device_busy_share"] < 0.98
