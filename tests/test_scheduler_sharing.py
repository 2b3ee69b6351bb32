"""Pages that requests share, and rows that give theirs up, in the whole scheduler."""

import pytest

from tests.builders import make_facts, make_scheduler_options
from tests.scheduler_fakes import Ring, expected_output, make_admit, rid_of, ring_of

DEPTHS = [1, 2, 3]
VOCAB = make_facts().vocab_size


def test_the_same_prompt_again_computes_one_page_less_than_all() -> None:
    """K35, and the hit is told to the caller."""
    ring = ring_of()
    for number, cached in [(1, 0), (2, 4), (3, 4)]:
        ring.send(make_admit(rid_of(number), [1, 2, 3, 4, 5, 6, 7, 8], 2))
        ring.drain()
        assert ring.received[rid_of(number), 1].cached_tokens == cached


def test_requests_of_one_step_share_what_that_step_computes() -> None:
    ring = ring_of(max_num_batched_tokens=64)
    prefix = list(range(40))
    for number in range(4):
        ring.send(make_admit(rid_of(number), [*prefix, number], 3))
    ring.drain()
    assert ring.scheduler.counters()["prefill_tokens"] == 41 + 3
    assert ring.scheduler.counters()["prefix_hit_tokens"] == 120


def test_generated_pages_are_found_by_the_next_turn() -> None:
    ring = ring_of()
    first = make_admit(rid_of(1), [1, 2, 3], 30)
    ring.send(first)
    ring.drain()
    answer = ring.received[rid_of(1), 1].ids
    ring.send(make_admit(rid_of(2), [1, 2, 3, *answer, 9], 2))
    ring.drain()
    # 33 ids were known, of which the last was never fed: 32 computed, 8 pages.
    assert ring.received[rid_of(2), 1].cached_tokens == 32


def test_salts_and_switched_off_caching_share_nothing() -> None:
    ring = ring_of()
    for number, salt in enumerate(["", "a", "b"]):
        ring.send(make_admit(rid_of(number), list(range(20)), 2, salt=salt))
        ring.drain()
    assert ring.scheduler.counters()["prefix_hit_tokens"] == 0
    off = ring_of(prefix_caching=False)
    for number in range(2):
        off.send(make_admit(rid_of(number), list(range(20)), 2))
        off.drain()
    assert off.scheduler.counters()["prefix_hit_tokens"] == off.scheduler.counters()["pages_cached"] == 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_forced_preemption_changes_no_token(depth: int, every: int) -> None:
    """K39: nothing is streamed twice, minimum and maximum lengths hold."""
    ring = ring_of(pipeline_depth=depth, debug_preempt_every=every)
    admits = [
        make_admit(rid_of(number), [number] * (3 * number + 1), 25, min_new=5, stop_ids=[1, 2, 3, 4, 5])
        for number in range(1, 7)
    ]
    for admit in admits:
        ring.send(admit)
    ring.drain()
    assert ring.scheduler.counters()["preemptions"] >= 5
    for admit in admits:
        got = ring.received[admit.rid, 1]
        want, finish, matched = expected_output(admit, VOCAB)
        assert (got.ids, got.finish, got.matched) == (want, finish, matched)
        assert got.starts == list(range(len(want)))
        assert got.opened == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_pool_too_small_preempts_by_itself_and_changes_no_token(depth: int) -> None:
    facts = make_facts(num_pages=20, max_model_len=80)
    ring = Ring(make_scheduler_options(pipeline_depth=depth), facts)
    ring.scheduler._admission.lengths._mean[0] = 1.0  # admission expects short answers, and is wrong
    ring.scheduler._admission.lengths._deviation[0] = 0.0
    admits = [make_admit(rid_of(number), [number] * 9, 40) for number in range(6)]
    for admit in admits:
        ring.send(admit)
    ring.drain()
    counters = ring.scheduler.counters()
    assert counters["preemptions"] > 0
    for admit in admits:
        assert ring.received[admit.rid, 1].ids == expected_output(admit, VOCAB)[0]
    assert counters["preempted_tokens"] > 0


def test_a_victim_has_gained_something_since_it_was_placed() -> None:
    """Otherwise two rows could take each other's pages for ever."""
    ring = ring_of()
    ring.send(make_admit(rid_of(1), [1, 2, 3], 30))
    running = ring.scheduler._running
    for _ in range(3):
        while ring.plan():
            pass
        assert not running.preemptible()
        assert running.victim() is None
        ring.result()
        assert [request.rid for request in running.preemptible()] == [rid_of(1)]
        ring.scheduler._lifecycle.preempt(running.preemptible()[0])
        while ring.result():
            pass
    ring.drain()
    assert len(ring.received[rid_of(1), 1].ids) == 30


def test_thrashing_throttles_admission_and_shows() -> None:
    facts = make_facts(num_pages=40, max_model_len=160)
    ring = Ring(make_scheduler_options(max_num_seqs=8), facts)
    ring.scheduler._admission.lengths.expect = lambda *_: 0  # type: ignore[method-assign]
    for number in range(40):
        ring.send(make_admit(rid_of(number), [number] * 20, 60))
    worst = 0.0
    for _ in range(3000):
        if not ring.turn():
            break
        worst = max(worst, ring.scheduler.counters()["throttled_pages"])
    ring.drain()
    assert worst >= 1
    assert ring.scheduler.counters()["thrash"] > 0


def test_expected_lengths_keep_a_pool_from_preempting() -> None:
    """With a learned length the batch stays as large as the pool carries, and no more."""
    facts = make_facts(num_pages=60, max_model_len=160)
    ring = Ring(make_scheduler_options(max_num_seqs=32), facts)
    for number in range(60):
        ring.send(make_admit(rid_of(number), [number] * 8, 40))
    most = 0.0
    while ring.turn():
        most = max(most, ring.scheduler.counters()["running"])
    ring.drain()
    assert ring.scheduler.counters()["preemptions"] <= 3
    assert most >= 5


def test_an_evicted_prefix_is_matched_again_before_admission() -> None:
    """K37: a queued request counted on a prefix that is gone when its turn comes."""
    facts = make_facts(num_pages=16, max_model_len=64)
    ring = Ring(make_scheduler_options(), facts)
    prefix = list(range(24))
    ring.send(make_admit(rid_of(1), [*prefix, 1], 2))
    ring.drain()
    ring.send(make_admit(rid_of(2), [500] * 36, 20))  # takes 14 pages of 16, evicting the prefix
    ring.turn()
    waiting = make_admit(rid_of(3), [*prefix, 2], 5)
    ring.send(waiting)
    ring.drain()
    assert ring.received[rid_of(3), 1].ids == expected_output(waiting, VOCAB)[0]
