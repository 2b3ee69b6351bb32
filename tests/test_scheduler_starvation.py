"""Long prompts neither starve short ones nor are starved, in simulated minutes of load."""

import random

import numpy as np
import pytest

from proto.messages import Admit, WorkClass
from scheduler.core import Scheduler
from tests.builders import make_facts, make_scheduler_options
from tests.scheduler_fakes import make_admit, rid_of
from tests.scheduler_simulation import SECOND, Device, Simulation

BUDGET = 2048
LONG = 30_000
SECONDS = 60
SHORT_TOKENS_PER_SECOND = 12_000  # the device prefills about 28 000


def make_simulation(depth: int = 2, host: int = 0) -> Simulation:
    facts = make_facts(num_pages=16_000, page_size=16, max_model_len=32_768, max_num_seqs=256, vocab_size=1000)
    options = make_scheduler_options(
        max_num_batched_tokens=BUDGET, max_num_seqs=256, max_queue=10_000, pipeline_depth=depth
    )
    return Simulation(Scheduler(options, facts, 1), Device(host=host))


def poisson(chooser: random.Random, rate: float) -> list[int]:
    times, at = [], 0.0
    while (at := at + chooser.expovariate(rate)) < SECONDS:
        times.append(int(at * SECOND) + 1)
    return times


def short_arrivals() -> list[Admit]:
    chooser = random.Random(1)
    return [
        make_admit(rid_of(number), [chooser.randrange(1000)] * chooser.randrange(200, 600), 32, arrival=at)
        for number, at in enumerate(poisson(chooser, SHORT_TOKENS_PER_SECOND / 400))
    ]


def long_arrivals() -> list[Admit]:
    """30 % of the load, by tokens; half of them in the class of the short ones."""
    chooser = random.Random(2)
    rate = SHORT_TOKENS_PER_SECOND * (0.3 / 0.7) / LONG
    return [
        make_admit(
            rid_of(1_000_000 + number),
            [chooser.randrange(1000), *[number % 1000] * (LONG - 1)],
            32,
            arrival=at,
            work_class=WorkClass.BATCH if number % 2 else WorkClass.CHAT,
        )
        for number, at in enumerate(poisson(chooser, rate))
    ]


def ttft(simulation: Simulation, arrivals: list[Admit]) -> np.ndarray:
    return np.array([simulation.first[admit.rid] - admit.arrival for admit in arrivals]) / SECOND


def test_thirty_percent_of_long_prompts_leave_short_ones_within_three_times_their_wait() -> None:
    shorts, longs = short_arrivals(), long_arrivals()
    alone = make_simulation()
    alone.run(shorts)
    mixed = make_simulation()
    mixed.run([*shorts, *longs])
    before, after = np.percentile(ttft(alone, shorts), 99), np.percentile(ttft(mixed, shorts), 99)
    assert after <= 3 * before, f"p99 TTFT of short prompts {after:.3f} s, without long ones {before:.3f} s"
    assert len(longs) >= 6
    assert ttft(mixed, longs).max() < 15
    # No decode waits for more than the step that runs beside its own: prefill never pauses it.
    assert max(mixed.gaps) <= mixed.longest_step
    assert mixed.longest_step <= Device().launch + BUDGET * Device().prefill_token + 256 * Device().decode_row


@pytest.mark.parametrize(("depth", "most", "least"), [(1, 0.20, 0.05), (2, 0.01, 0.0), (3, 0.01, 0.0)])
def test_pacing_keeps_the_device_busy(depth: int, most: float, least: float) -> None:
    """With half a millisecond between device and scheduler, steps of 4 ms follow each other from depth 2 on."""
    simulation = make_simulation(depth, host=500_000)
    simulation.run([make_admit(rid_of(number), [number] * 200, 300, arrival=1) for number in range(32)])
    share = simulation.idle / (simulation.idle + simulation.busy)
    assert least <= share <= most


def test_pacing_lets_a_newcomer_into_the_very_next_step() -> None:
    """A plan that left a whole step ahead would make it wait for one step more."""
    waits = {}
    for depth in (1, 2):
        simulation = make_simulation(depth)
        busy = [make_admit(rid_of(number), [number] * 200, 400, arrival=1) for number in range(32)]
        late = make_admit(rid_of(99), [5] * 50, 5, arrival=SECOND + 1_000_000)
        simulation.run([*busy, late])
        waits[depth] = simulation.first[late.rid] - late.arrival
    assert waits[2] <= waits[1] + 1_000_000
