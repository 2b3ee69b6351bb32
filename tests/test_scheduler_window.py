"""Pages behind windows in the scheduler: what is let go, what is hit, and how few pages suffice."""

import numpy as np
import pytest

from proto.messages import Flush, RejectCode, StepPlan, WorkClass
from scheduler.core import Scheduler
from scheduler.kv_cache import WindowedKvCache
from tests.builders import make_facts, make_scheduler_options
from tests.scheduler_fakes import Ring, make_admit, rid_of

PAGE, WINDOW = 4, 13  # an id at the beginning of a page sees three pages before it
REACH = 3


def make_ring(window_pages: int, *, num_pages: int = 0, window: int = WINDOW, **options: object) -> Ring:
    facts = make_facts(num_pages=num_pages, window=window, window_pages=window_pages, max_model_len=400)
    return Ring(make_scheduler_options(**{"max_num_batched_tokens": 32, **options}), facts)


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 1000, count)]


def used(ring: Ring) -> int:
    cache = ring.scheduler._cache
    assert isinstance(cache, WindowedKvCache)
    return cache.window.pool.used


def play(ring: Ring, number: int, prompt: list[int], max_new: int) -> list[int]:
    """Run a request to its end; returns the window's pages in use after each step."""
    ring.send(make_admit(rid_of(number), prompt, max_new, seed=1))
    held = []
    while ring.plan():
        held.append(used(ring))
        ring.result()
    ring.collect()
    assert len(ring.received[rid_of(number), 1].ids) == max_new
    return held


def cached(ring: Ring, number: int) -> int:
    return ring.received[rid_of(number), 1].cached_tokens


@pytest.mark.parametrize("num_pages", [0, 100])
def test_a_long_prompt_holds_its_window_and_a_chunk(num_pages: int) -> None:
    ring = make_ring(30, num_pages=num_pages)
    held = play(ring, 1, ids(300), 60)
    assert max(held) <= REACH + 32 // PAGE + 1
    assert max(held[12:]) == REACH + 1
    assert used(ring) == 0


def test_the_smallest_pool_that_can_serve_any_length() -> None:
    ring = make_ring(REACH + 1)
    assert max(play(ring, 1, ids(200), 100)) == REACH + 1
    tiny = make_ring(REACH)
    tiny.send(make_admit(rid_of(1), ids(20), 4))
    tiny.collect()
    reject = tiny.received[rid_of(1), 1].reject
    assert reject is not None
    assert (reject.code, reject.field) == (RejectCode.INVALID, "stopping.max_new_tokens")
    assert "need 4 KV pages of 4 tokens; the worker has 3" in reject.message
    play(tiny, 2, ids(8), 4)  # three pages hold all of it


@pytest.mark.parametrize("num_pages", [0, 200])
def test_a_prefix_shorter_than_the_window_is_hit_long_after_it_was_left_behind(num_pages: int) -> None:
    ring = make_ring(40, num_pages=num_pages)
    prefix = ids(12, seed=1)
    play(ring, 1, prefix + ids(50, seed=2), 60)
    play(ring, 2, prefix + ids(5, seed=3), 5)
    assert cached(ring, 2) == 12
    play(ring, 3, prefix[:8] + ids(5, seed=4), 5)
    assert cached(ring, 3) == 8


@pytest.mark.parametrize("num_pages", [0, 200])
def test_the_next_turn_of_a_long_conversation_hits_its_end(num_pages: int) -> None:
    ring = make_ring(12, num_pages=num_pages)
    prompt = ids(150, seed=1)
    play(ring, 1, prompt, 42)
    whole = prompt + ring.received[rid_of(1), 1].ids
    play(ring, 2, whole + ids(20, seed=2), 5)
    assert cached(ring, 2) == 188  # whole pages of 191 ids with K/V


def test_a_hit_needs_what_its_next_id_sees() -> None:
    """The middle of a long prompt is gone first: who parts from it there begins where all is there."""
    ring = make_ring(14)
    prompt = ids(150, seed=1)
    play(ring, 1, prompt, 4)
    play(ring, 2, ids(30, seed=2), 4)  # takes what is oldest
    play(ring, 3, prompt[:80] + ids(10, seed=3), 4)
    assert cached(ring, 3) <= 12
    ring.drain()


def test_who_computes_lost_pages_again_lets_others_hit_them() -> None:
    ring = make_ring(16)
    prefix = ids(12, seed=1)
    play(ring, 1, prefix + ids(40, seed=2), 4)
    play(ring, 2, ids(60, seed=3), 30)  # evicts the prefix, of which the tree still knows the ids
    play(ring, 3, prefix + ids(3, seed=4), 2)
    assert cached(ring, 3) == 0
    play(ring, 4, prefix + ids(3, seed=5), 2)
    assert cached(ring, 4) == 12


def test_salts_and_a_flush_hold_for_pages_behind_windows() -> None:
    ring = make_ring(40)
    prompt = ids(12, seed=1)
    ring.send(make_admit(rid_of(1), [*prompt, 1], 2, salt="a"))
    ring.drain()
    ring.send(make_admit(rid_of(2), [*prompt, 1], 2, salt="b"))
    ring.drain()
    assert cached(ring, 2) == 0
    ring.send(make_admit(rid_of(3), [*prompt, 1], 2, salt="a"))
    ring.drain()
    assert cached(ring, 3) == 12
    assert ring.scheduler.counters()["pages_cached"] == 6
    ring.send(Flush(rid=rid_of(9)))
    ring.collect()
    assert ring.others[-1].message.pages == 6  # type: ignore[attr-defined]
    assert ring.scheduler.counters()["pages_free"] == 40
    ring.send(make_admit(rid_of(4), [*prompt, 1], 2, salt="a"))
    ring.drain()
    assert cached(ring, 4) == 0


def test_a_row_whose_logits_are_not_finite_leaves_nothing_to_hit() -> None:
    ring = make_ring(40)
    ring.worker.failing = {5}
    ring.send(make_admit(rid_of(1), ids(30, seed=1), 4, seed=5))
    ring.drain()
    assert ring.received[rid_of(1), 1].reject is not None
    assert ring.scheduler.counters()["pages_free"] == 40
    play(ring, 2, ids(30, seed=1), 4)
    assert cached(ring, 2) == 0


def test_prefills_that_hold_all_pages_and_cannot_go_on_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should admission expect too little: two rows share what they see at first; then each needs pages of its own."""
    monkeypatch.setattr(WindowedKvCache, "_window_peak_with", lambda self, request: 0)
    fewer = []
    make_way = Scheduler._plan_with_fewer

    def watch(scheduler: Scheduler, now: int) -> StepPlan | None:
        fewer.append(now)
        return make_way(scheduler, now)

    monkeypatch.setattr(Scheduler, "_plan_with_fewer", watch)
    ring = make_ring(4, window=9, max_num_batched_tokens=4, pipeline_depth=1)
    prompt = ids(80, seed=1)
    ring.send(make_admit(rid_of(1), prompt, 4, work_class=WorkClass.CHAT))
    for _ in range(6):
        ring.plan()
        ring.result()
    ring.send(make_admit(rid_of(2), [*prompt[:60], *ids(20, seed=2)], 4, work_class=WorkClass.AGENT))
    ring.drain()
    assert fewer
    assert [len(ring.received[rid_of(n), 1].ids) for n in (1, 2)] == [4, 4]


def test_two_groups_are_counted_apart() -> None:
    ring = make_ring(20, num_pages=50)
    ring.send(make_admit(rid_of(1), ids(60), 10))
    ring.plan()
    counters = ring.scheduler.counters()
    assert (counters["pages_total"], counters["window_pages_total"]) == (50, 20)
    assert (counters["pages_free"], counters["window_pages_free"]) == (35, 12)
    ring.drain()
