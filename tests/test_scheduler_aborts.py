"""Requests that end or are replaced from outside: aborts, attempts, censuses, servers that died."""

import pytest

from proto.ids import StageKind, make_rid
from proto.messages import (
    U32,
    U64,
    Census,
    CensusReply,
    Finish,
    Flush,
    StageState,
    column,
)
from tests.builders import make_facts, make_scheduler_options, make_stage, make_world
from tests.scheduler_fakes import MS, Ring, expected_output, make_abort, make_admit, rid_of, ring_of

DEPTHS = [1, 2, 3]
VOCAB = make_facts().vocab_size


def states() -> list[str]:
    return ["queued", "first chunk", "mid-chunk", "first id", "decoding", "preempted", "last step", "finished"]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("state", states())
def test_an_abort_in_every_state_frees_everything(depth: int, state: str) -> None:
    """K40."""
    ring = Ring(make_scheduler_options(pipeline_depth=depth, max_num_batched_tokens=16))
    rid = rid_of(1)
    max_new = 1 if state == "last step" else 8
    if state == "queued":
        for number in range(2, 12):
            ring.send(make_admit(rid_of(number), [number], 6))
        ring.turn()
    ring.send(make_admit(rid, list(range(40)), max_new))
    turns = {"queued": 0, "mid-chunk": 2, "decoding": 6, "preempted": 6, "finished": 40}.get(state, 0)
    for _ in range(turns):
        ring.turn()
    if state == "first chunk":
        assert ring.plan()
    if state in ("last step", "first id"):
        while any(request.done < 40 for request in ring.scheduler._running.prefills) or not ring.scheduler._step:
            ring.plan()
            if ring.scheduler._running.prefills:
                ring.result()
    if state == "preempted":
        ring.scheduler._lifecycle.preempt(ring.scheduler._running.preemptible()[0])
    ended = ring.received[rid, 1].ended if (rid, 1) in ring.received else False
    assert ended is (state == "finished")
    ring.send(make_abort((rid, 1)))
    ring.send(make_abort((rid, 1)))
    ring.collect()
    assert rid not in ring.scheduler._registry.requests
    ring.drain()
    got = ring.received.get((rid, 1))
    if got is not None and not ended:
        assert got.finish is Finish.NONE
        assert got.closed == got.opened
    ring.send(Flush(rid=rid))
    assert ring.scheduler.counters()["pages_free"] == ring.facts.num_pages


def test_an_abort_that_overtakes_its_admit_holds() -> None:
    ring = ring_of()
    ring.send(make_abort((rid_of(1), 2)))
    ring.send(make_admit(rid_of(1), [1], 5, attempt=2))
    ring.drain()
    assert not ring.received
    ring.send(make_admit(rid_of(1), [1], 5, attempt=3))
    ring.drain()
    assert len(ring.received[rid_of(1), 3].ids) == 5


def test_tombstones_are_bounded() -> None:
    ring = ring_of()
    for number in range(20_000):
        ring.send(make_abort((rid_of(number), 1)))
    assert len(ring.scheduler._registry._tombstones) <= 16_384
    ring.send(make_admit(rid_of(19_999), [1], 5))
    ring.drain()
    assert not ring.received


def test_a_higher_attempt_supersedes_and_a_lower_one_is_dropped() -> None:
    ring = ring_of()
    first = make_admit(rid_of(1), list(range(10)), 20)
    ring.send(first)
    for _ in range(6):
        ring.turn()
    ids = list(ring.received[rid_of(1), 1].ids)
    assert ids
    ring.send(make_admit(rid_of(1), list(range(10)), 20, output=ids, attempt=2))
    ring.send(first)
    ring.drain()
    assert ring.received[rid_of(1), 1].closed == 1
    assert ids + ring.received[rid_of(1), 2].ids == expected_output(first, VOCAB)[0]
    assert ring.scheduler.counters()["superseded"] == 1
    assert ring.scheduler.counters()["ignored_admits"] == 1


def census_of(*requests: tuple[int, int]) -> Census:
    abort = make_abort(*requests)
    return Census(server=0, rids=abort.rids, attempts=abort.attempts)


def test_a_census_finds_the_unknown_and_the_leaked() -> None:
    ring = ring_of()
    ring.send(make_world(make_stage(StageKind.SERVER, 0, 1), make_stage(StageKind.SERVER, 1, 1)))
    kept, leaked, other = rid_of(1), rid_of(2), rid_of(3, server=1)
    for rid in (kept, leaked, other):
        ring.send(make_admit(rid, [1, 2, 3], 190))
    for number in range(4):
        ring.now += 1000 * MS
        assert number == 0 or leaked in ring.scheduler._registry.requests
        ring.send(census_of((kept, 1), (rid_of(9), 1)))
    # The first census may have been written before the Admit: it does not count.
    assert list(ring.scheduler._registry.requests) == [kept, other]
    ring.collect()
    replies = [message for _, message in ring.others if isinstance(message, CensusReply)]
    assert len(replies) == 4
    assert column(replies[0].rids, U64).tolist() == [rid_of(9)]
    assert column(replies[0].attempts, U32).tolist() == [1]


def test_an_empty_census_speaks_for_its_server_alone() -> None:
    ring = ring_of()
    ring.send(make_world(make_stage(StageKind.SERVER, 0, 1), make_stage(StageKind.SERVER, 1, 1)))
    other = rid_of(2, server=1)
    for rid in (rid_of(1), other):
        ring.send(make_admit(rid, [1], 50))
    for _ in range(4):
        ring.now += 1000 * MS
        ring.send(census_of())
    assert list(ring.scheduler._registry.requests) == [other]
    assert ring.scheduler.counters()["leaked"] == 1


@pytest.mark.parametrize("state", [StageState.DEAD, StageState.READY])
def test_a_dead_servers_requests_are_aborted(state: StageState) -> None:
    ring = ring_of()
    ring.send(make_world(make_stage(StageKind.SERVER, 0, 1), make_stage(StageKind.SERVER, 1, 1)))
    mine, others = make_rid(0, 1, 5), make_rid(1, 1, 5)
    ring.send(make_admit(mine, [1], 50))
    ring.send(make_admit(others, [2], 5))
    for _ in range(3):
        ring.turn()
    newer = 1 if state is StageState.DEAD else 2
    ring.send(make_world(make_stage(StageKind.SERVER, 0, newer, state), make_stage(StageKind.SERVER, 1, 1)))
    assert list(ring.scheduler._registry.requests) == [others]
    ring.send(make_admit(make_rid(0, 1, 6), [1], 50))  # one that was on its way
    ring.send(make_admit(make_rid(0, 2, 1), [1], 5))
    ring.drain()
    assert ring.received[mine, 1].closed == 1
    assert (make_rid(0, 1, 6), 1) not in ring.received
    assert ring.received[others, 1].finish is Finish.LENGTH
    assert len(ring.received[make_rid(0, 2, 1), 1].ids) == 5
