"""Estimates, victims and queues."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from proto.messages import Admit, WorkClass
from scheduler.policy import OutputLengths, PrefillSpeed, Thrash, cheapest_victim, expected_peak
from scheduler.prefix import Path
from scheduler.queue import Queues
from scheduler.request import Request
from scheduler.stops import StopTable
from tests.scheduler_fakes import make_admit

SECOND = 1_000_000_000


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=12))
def test_the_peak_is_that_of_a_simulation(rows: list[tuple[int, int]]) -> None:
    held = np.array([h for h, _ in rows], np.int64)
    growth = np.array([g for _, g in rows], np.int64)
    peak = 0
    for step in range(1, 31):
        peak = max(peak, int((held + step)[growth >= step].sum()))
    assert expected_peak(held, growth) == peak


def test_the_victim_is_the_cheapest_after_prefix_reuse() -> None:
    # Row 0 would recompute three pages, row 1 one (others are shared), row 2 frees nothing.
    freed = np.array([3, 1, 0])
    assert cheapest_victim(freed, np.array([1, 1, 1])) == 1
    assert cheapest_victim(freed, np.array([1, 4, 1])) == 0
    assert cheapest_victim(np.array([2, 2]), np.array([1, 1])) == 1


def test_lengths_are_learned_by_class_and_preemption_makes_them_careful() -> None:
    lengths = OutputLengths()
    assert lengths.expect(WorkClass.CHAT, 0, 100) == 100
    for _ in range(500):
        lengths.observe_finish(WorkClass.CHAT, 20)
    calm = lengths.expect(WorkClass.CHAT, 0, 1000)
    assert 20 <= calm <= 25
    assert lengths.expect(WorkClass.BATCH, 0, 1000) > 200
    for n in range(200):
        lengths.observe_finish(WorkClass.CHAT, 10 + n % 20)
    lengths.observe_preemption()
    assert lengths.expect(WorkClass.CHAT, 0, 1000) > 21
    assert lengths.expect(WorkClass.CHAT, 400, 1000) > 400


def test_prefill_speed_ignores_steps_that_measure_the_launch() -> None:
    speed = PrefillSpeed()
    speed.observe(1, 10_000_000)
    assert speed.duration(10_000) == 0
    speed.observe(1000, SECOND)
    assert speed.duration(500) == SECOND // 2


def test_thrash_takes_headroom_in_proportion() -> None:
    thrash = Thrash()
    assert thrash.headroom(1000) == 0
    for _ in range(1000):
        thrash.observe_step(64)
    thrash.observe_recompute(3000)
    assert 0.05 < thrash.ratio < 0.15
    assert thrash.headroom(1000) == int(thrash.ratio * 1000)
    thrash.observe_recompute(10**9)
    assert thrash.headroom(1000) == 500


# ------------------------------------------------------------------ queues


def make_request(admit: Admit, long: bool = False) -> Request:
    request = Request(
        rid=admit.rid,
        attempt=1,
        ids=admit.prompt_ids,
        tokens=len(admit.prompt_ids) // 4,
        prompt_len=len(admit.prompt_ids) // 4,
        max_len=len(admit.prompt_ids) // 4 + admit.max_new_tokens,
        min_len=0,
        sampling=admit.sampling,
        stop_ids=b"",
        stops=StopTable(10).find(b"", 0),
        work_class=admit.work_class,
        priority=admit.priority,
        deadline=0,
        arrival=admit.arrival,
        opening=b"",
        detokenizer=0,
        path=Path(""),
        seen=0,
    )
    request.long = long
    return request


def push(queues: Queues, number: int, work_class: WorkClass, arrival: int = 1, priority: int = 0) -> Request:
    request = make_request(make_admit(number, [1] * 100, 1, work_class=work_class, arrival=arrival, priority=priority))
    queues.enqueue(request)
    return request


def serve(queues: Queues, now: int) -> Request:
    request = queues.best(now)
    assert request is not None
    queues.pop_best(request)
    queues.account_prefill(request.work_class, request.tokens)
    return request


def test_busy_classes_share_by_weight() -> None:
    queues = Queues()
    for number in range(400):
        for work_class in WorkClass:
            push(queues, number * 3 + work_class, work_class)
    served = [serve(queues, now=1).work_class for _ in range(260)]
    shares = [served.count(work_class) for work_class in WorkClass]
    assert [round(share / shares[2]) for share in shares] == [8, 4, 1]


def test_a_class_that_was_away_gets_no_credit_for_it() -> None:
    queues = Queues()
    for number in range(100):
        push(queues, number, WorkClass.CHAT)
    for _ in range(80):
        serve(queues, now=1)
    for number in range(100, 200):
        push(queues, number, WorkClass.BATCH)
    assert [serve(queues, now=1).work_class for _ in range(9)].count(WorkClass.CHAT) >= 7


def test_age_brings_the_lightest_class_forward() -> None:
    queues = Queues()
    queues.account_prefill(WorkClass.BATCH, 5000)
    push(queues, 1, WorkClass.BATCH)
    push(queues, 2, WorkClass.CHAT, arrival=60 * SECOND)
    assert serve(queues, now=60 * SECOND).work_class is WorkClass.BATCH


def test_priority_orders_a_class_and_waiting_makes_up_for_it() -> None:
    queues = Queues()
    push(queues, 1, WorkClass.CHAT, arrival=1)
    push(queues, 2, WorkClass.CHAT, arrival=2 * SECOND, priority=1)
    push(queues, 3, WorkClass.CHAT, arrival=20 * SECOND, priority=1)
    assert [serve(queues, now=21 * SECOND).rid for _ in range(3)] == [2, 1, 3]


def test_a_scan_passes_by_and_puts_back() -> None:
    queues = Queues()
    requests = [push(queues, number, WorkClass.CHAT, arrival=number) for number in range(10)]
    seen = []
    while (request := queues.best(100)) is not None:
        seen.append(request.rid)
        queues.pass_by(request)
    assert seen == [0, 1, 2, 3]  # a scan is bounded
    queues.end_scan()
    queues.remove(requests[0])
    assert queues.count == 9
    assert serve(queues, 100).rid == 1


def test_a_queue_forgets_removed_requests_in_any_order() -> None:
    chooser = random.Random(1)
    queues = Queues()
    waiting = [push(queues, number, chooser.choice(list(WorkClass)), arrival=number) for number in range(2000)]
    chooser.shuffle(waiting)
    for request in waiting[:1990]:
        queues.remove(request)
    assert queues.count == 10
    assert sum(len(lane.heap) for lanes in queues._lanes for lane in lanes) < 500
    left = {serve(queues, 1).rid for _ in range(10)}
    assert left == {request.rid for request in waiting[1990:]}
    assert queues.best(1) is None
    assert queues.tokens == 0
