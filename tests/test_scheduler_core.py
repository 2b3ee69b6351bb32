"""The scheduler against a fake worker that remembers what its pages hold: one behaviour a test."""

import msgspec
import numpy as np
import pytest

from proto.ids import StageKind, make_rid
from proto.messages import (
    U32,
    U64,
    Census,
    CensusReply,
    Desync,
    Emit,
    Finish,
    Flush,
    FlushReply,
    RejectCode,
    StageState,
    WorkClass,
    column,
)
from scheduler.results import WorkerError
from tests.scheduler_fakes import (
    MS,
    Ring,
    expected_output,
    make_abort,
    make_admit,
    make_facts,
    make_options,
    make_stage,
    make_world,
    rid_of,
    token_at,
)

DEPTHS = [1, 2, 3]
VOCAB = make_facts().vocab_size


def ring_of(**options: object) -> Ring:
    return Ring(make_options(**options))


# ------------------------------------------------------------------ generation


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 63, 64, 65, 150])
def test_a_request_gets_its_tokens_whatever_the_depth(depth: int, prompt: int) -> None:
    ring = ring_of(pipeline_depth=depth)
    admit = make_admit(rid_of(1), list(range(prompt)), 20)
    ring.send(admit)
    ring.drain()
    got = ring.received[admit.rid, 1]
    assert (got.ids, got.finish, got.matched) == expected_output(admit, VOCAB)
    assert got.starts == list(range(20))
    assert got.opened == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_that_ends_by_length_is_never_planned_beyond(depth: int) -> None:
    ring = ring_of(pipeline_depth=depth)
    for number in range(5):
        ring.send(make_admit(rid_of(number), [number, 2, 3], 3 + number))
    ring.drain()
    counters = ring.scheduler.counters()
    assert counters["generated_tokens"] == 3 + 4 + 5 + 6 + 7
    assert counters["wasted_rows"] == counters["dropped_rows"] == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_id_wastes_at_most_depth_less_one_rows(depth: int) -> None:
    ring = ring_of(pipeline_depth=depth)
    rid = rid_of(1)
    stop = token_at(rid, 3 + 6, VOCAB, set(), 0)
    admit = make_admit(rid, [1, 2, 3], 50, stop_ids=[5, stop], num_eos=1)
    ring.send(admit)
    ring.drain()
    got = ring.received[rid, 1]
    assert (got.finish, got.matched, got.matched_eos) == (Finish.STOP, stop, False)
    assert len(got.ids) == 7
    assert ring.scheduler.counters()["wasted_rows"] == depth - 1 == ring.scheduler.counters()["dropped_rows"]


def test_an_eos_id_is_told_from_a_stop_id() -> None:
    ring = ring_of()
    rid = rid_of(1)
    eos = token_at(rid, 3, VOCAB, set(), 0)
    ring.send(make_admit(rid, [1, 2, 3], 50, stop_ids=[eos, 7], num_eos=1))
    ring.drain()
    assert ring.received[rid, 1].matched_eos


def test_stops_do_not_count_before_min_new_tokens() -> None:
    """K14: the worker masks them; one that comes nevertheless does not end the row."""
    ring = ring_of()
    rid = rid_of(1)
    admit = make_admit(rid, [1, 2, 3], 30, min_new=8, stop_ids=list(range(0, VOCAB, 2)))
    ring.send(admit)
    ring.drain()
    got = ring.received[rid, 1]
    assert len(got.ids) >= 9
    assert all(token % 2 for token in got.ids[:8])
    assert got.finish is Finish.STOP


def test_a_stop_that_comes_before_the_minimum_ends_nothing() -> None:
    ring = ring_of()
    ring.worker.masks = False
    rid = rid_of(1)
    first, last = (token_at(rid, 3 + n, VOCAB, set(), 0) for n in (2, 8))
    ring.send(make_admit(rid, [1, 2, 3], 30, min_new=8, stop_ids=[first, last]))
    ring.drain()
    got = ring.received[rid, 1]
    assert (len(got.ids), got.matched) == (9, last)


def test_no_new_tokens_means_prefill_and_an_end_without_tokens() -> None:
    ring = ring_of()
    ring.send(make_admit(rid_of(1), list(range(100)), 0))
    ring.send(make_admit(rid_of(2), [5, 6], 4))
    ring.drain()
    got = ring.received[rid_of(1), 1]
    assert (got.ids, got.starts, got.finish, got.opened) == ([], [0], Finish.LENGTH, 1)
    assert ring.scheduler.counters()["prefill_tokens"] == 102
    assert len(ring.received[rid_of(2), 1].ids) == 4


def test_resumed_output_counts_as_output() -> None:
    ring = ring_of()
    whole = make_admit(rid_of(1), [1, 2, 3], 10, seed=5)
    want, _, _ = expected_output(whole, VOCAB)
    ring.send(make_admit(rid_of(1), [1, 2, 3], 10, output=want[:4], attempt=2, seed=5))
    ring.drain()
    got = ring.received[rid_of(1), 2]
    assert got.ids == want[4:]
    assert got.starts == list(range(4, 10))


@pytest.mark.parametrize(("stop", "finish"), [(False, Finish.LENGTH), (True, Finish.STOP)])
def test_a_continuation_whose_output_is_complete_ends_at_once(stop: bool, finish: Finish) -> None:
    ring = ring_of()
    max_new = 20 if stop else 3
    ring.send(make_admit(rid_of(1), [1, 2], max_new, output=[7, 8, 9], attempt=2, stop_ids=[9] if stop else []))
    ring.collect()
    got = ring.received[rid_of(1), 2]
    assert (got.ids, got.starts, got.finish, got.opened) == ([], [3], finish, 1)
    assert not ring.plan()


def test_a_steady_step_says_nothing_but_its_number() -> None:
    ring = ring_of(max_num_seqs=32, max_num_batched_tokens=512)
    ring.keep_plans = True
    for number in range(30):
        ring.send(make_admit(rid_of(number), [number], 40))
    for _ in range(20):
        ring.turn()
    quiet = [plan for plan in ring.plans[3:] if not plan.append_slots]
    assert quiet
    assert all(len(msgspec.msgpack.encode(plan)) < 40 and plan.decode_slots is None for plan in quiet)


def test_equal_seeds_give_equal_plans() -> None:
    def plans() -> list[bytes]:
        ring = ring_of(max_num_seqs=4, debug_preempt_every=5)
        ring.keep_plans = True
        for number in range(20):
            ring.send(make_admit(rid_of(number), [number % 3] * (5 + number), 9, work_class=WorkClass(number % 3)))
        ring.drain()
        return [msgspec.msgpack.encode(plan) for plan in ring.plans]

    assert plans() == plans()


# ------------------------------------------------------------------ prefix cache, preemption


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
    ring = Ring(make_options(pipeline_depth=depth), facts)
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
    ring = Ring(make_options(max_num_seqs=8), facts)
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
    ring = Ring(make_options(max_num_seqs=32), facts)
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
    ring = Ring(make_options(), facts)
    prefix = list(range(24))
    ring.send(make_admit(rid_of(1), [*prefix, 1], 2))
    ring.drain()
    ring.send(make_admit(rid_of(2), [500] * 36, 20))  # takes 14 pages of 16, evicting the prefix
    ring.turn()
    waiting = make_admit(rid_of(3), [*prefix, 2], 5)
    ring.send(waiting)
    ring.drain()
    assert ring.received[rid_of(3), 1].ids == expected_output(waiting, VOCAB)[0]


# ------------------------------------------------------------------ refusals


def test_what_can_never_fit_is_refused_and_the_queue_advances() -> None:
    """K20."""
    ring = Ring(make_options(), make_facts(num_pages=20, max_model_len=200))
    for number, prompt, max_new, field in [
        (1, 10, 72, "72"),
        (2, 150, 60, "210"),
        (3, 0, 5, "no token"),
    ]:
        ring.send(make_admit(rid_of(number), [1] * prompt, max_new))
        ring.collect()
        reject = ring.received[rid_of(number), 1].reject
        assert reject is not None
        assert reject.code is RejectCode.INVALID
        assert field in reject.message
        assert reject.field
    ring.send(make_admit(rid_of(4), [1] * 10, 71))  # 80 K/V: exactly the pool
    ring.send(make_admit(rid_of(5), [2] * 10, 5))
    ring.drain()
    assert len(ring.received[rid_of(4), 1].ids) == 71
    assert len(ring.received[rid_of(5), 1].ids) == 5


def test_ids_outside_the_vocabulary_are_refused() -> None:
    ring = ring_of()
    for number, bad in [(1, VOCAB), (2, -1)]:
        ring.send(make_admit(rid_of(number), [1, bad, 2], 5))
        ring.collect()
        reject = ring.received[rid_of(number), 1].reject
        assert reject is not None
        assert f"token id {bad} " in reject.message


def test_a_full_queue_says_when_to_come_back() -> None:
    ring = ring_of(max_queue=3, max_num_seqs=1)
    for number in range(6):
        ring.send(make_admit(rid_of(number), [number] * 3, 30))
        ring.turn()
    reject = next(got.reject for got in ring.received.values() if got.reject is not None)
    assert reject.code is RejectCode.EXHAUSTED
    assert reject.retry_after_ms > 0
    assert "max_queue is 3" in reject.message
    ring.drain()
    assert sum(got.finish is Finish.LENGTH for got in ring.received.values()) >= 4


def test_far_deadlines_of_requests_that_ended_are_forgotten() -> None:
    """They were kept until they passed: at 150 requests a second of an hour each, half a million of them."""
    ring = Ring()
    for number in range(1200):
        ring.send(make_admit(rid_of(number), [1, 2], 1, deadline=ring.now + 10**15))
        if number % 4 == 3:
            ring.turn()
    ring.drain()
    assert ring.scheduler.counts.finished == 1200
    assert len(ring.scheduler._lifecycle._deadlines) < 1100


def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    """K43."""
    ring = ring_of(max_num_seqs=1)
    ring.send(make_admit(rid_of(1), [1, 2], 100))
    ring.turn()
    ring.send(make_admit(rid_of(2), [3, 4], 5, deadline=ring.now + 10 * MS))
    for _ in range(15):
        ring.turn()
    reject = ring.received[rid_of(2), 1].reject
    assert reject is not None
    assert reject.code is RejectCode.DEADLINE
    assert not ring.received[rid_of(1), 1].ended


def test_a_prefill_that_cannot_end_in_time_is_refused_at_once() -> None:
    ring = ring_of()
    ring.send(make_admit(rid_of(1), [1] * 64, 2))
    ring.drain()  # 64 tokens in a step of 1 ms: 64 000 tokens a second
    ring.send(make_admit(rid_of(2), [2] * 128, 2, deadline=ring.now + MS))
    ring.send(make_admit(rid_of(3), [3] * 128, 2, deadline=ring.now + 100 * MS))
    ring.collect()
    reject = ring.received[rid_of(2), 1].reject
    assert reject is not None
    assert reject.code is RejectCode.DEADLINE
    assert "prefill of 128 tokens takes 2 ms" in reject.message
    ring.drain()
    assert ring.received[rid_of(3), 1].finish is Finish.LENGTH


def test_logits_that_are_not_finite_fail_one_request_alone() -> None:
    ring = ring_of()
    sick, well = make_admit(rid_of(1), [1] * 9, 30), make_admit(rid_of(2), [2] * 9, 30)
    ring.send(sick)
    ring.send(well)
    for _ in range(5):
        ring.turn()
    ring.worker.failing.add(sick.sampling.seed)
    ring.drain()
    got = ring.received[sick.rid, 1]
    assert got.reject is not None
    assert got.reject.code is RejectCode.INTERNAL
    assert got.closed == 1
    assert ring.received[well.rid, 1].ids == expected_output(well, VOCAB)[0]
    again = make_admit(rid_of(3), [1] * 9, 3)
    ring.send(again)
    ring.drain()
    assert ring.received[again.rid, 1].cached_tokens == 0, "pages of a failed request were shared"


# ------------------------------------------------------------------ chunks


@pytest.mark.parametrize("depth", DEPTHS)
def test_decodes_go_on_while_a_long_prompt_is_prefilled(depth: int) -> None:
    ring = Ring(make_options(pipeline_depth=depth, max_num_batched_tokens=16))
    ring.keep_plans = True
    ring.send(make_admit(rid_of(1), [1, 2], 100))
    ring.turn()
    ring.send(make_admit(rid_of(2), list(range(150)), 3))
    turns = 0
    while (rid_of(2), 1) not in ring.received:
        before = len(ring.received[rid_of(1), 1].ids)
        ring.turn()
        assert len(ring.received[rid_of(1), 1].ids) == before + 1
        turns += 1
    assert turns >= 10
    assert ring.worker.max_chunk_tokens <= 16
    ring.drain()


@pytest.mark.parametrize("depth", DEPTHS)
def test_without_chunked_prefill_a_prompt_runs_in_one_step(depth: int) -> None:
    ring = Ring(make_options(pipeline_depth=depth, chunked_prefill=False, max_num_batched_tokens=64))
    ring.keep_plans = True
    ring.send(make_admit(rid_of(1), [1] * 65, 3))
    ring.send(make_admit(rid_of(2), [2, 3], 60))
    ring.send(make_admit(rid_of(3), [4, 5], 60))
    ring.turn()
    ring.send(make_admit(rid_of(4), list(range(64)), 3))  # fits only a step without decodes
    ring.drain()
    reject = ring.received[rid_of(1), 1].reject
    assert reject is not None
    assert "max_num_batched_tokens (64)" in reject.message
    sizes = [int(count) for plan in ring.plans for _, count, _ in column(plan.chunks).reshape(-1, 3)]
    assert 64 in sizes
    assert ring.received[rid_of(4), 1].ended_at < ring.received[rid_of(3), 1].ended_at


def test_fewer_tokens_a_step_than_rows_still_serves_all() -> None:
    ring = ring_of(max_num_batched_tokens=3, max_num_seqs=8)
    for number in range(8):
        ring.send(make_admit(rid_of(number), [number] * 7, 6))
    ring.drain()
    assert all(len(got.ids) == 6 for got in ring.received.values())


# ------------------------------------------------------------------ aborts, attempts, leaks


def states() -> list[str]:
    return ["queued", "first chunk", "mid-chunk", "first id", "decoding", "preempted", "last step", "finished"]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("state", states())
def test_an_abort_in_every_state_frees_everything(depth: int, state: str) -> None:
    """K40."""
    ring = Ring(make_options(pipeline_depth=depth, max_num_batched_tokens=16))
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
    replies = [message for _, _, message in ring.others if isinstance(message, CensusReply)]
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


# ------------------------------------------------------------------ others


def test_rows_are_parted_among_detokenizers() -> None:
    ring = ring_of()
    ring.send(make_world(*(make_stage(StageKind.DETOKENIZER, index, 1) for index in range(3))))
    admits = [make_admit(rid_of(number), [number], 3 + number % 3) for number in range(8)]
    for admit in admits:
        ring.send(admit)
    places: dict[int, set[int]] = {}
    take = ring._take
    for _ in range(20):
        while ring.plan():
            pass
        ring.result()
        for kind, index, message in ring.scheduler.outgoing():
            assert kind is StageKind.DETOKENIZER
            assert isinstance(message, Emit)
            take(message)
            for rid in column(message.rids, U64).tolist():
                places.setdefault(rid, set()).add(index)
    assert all(indexes == {rid % 3} for rid, indexes in places.items())
    for admit in admits:
        got = ring.received[admit.rid, 1]
        assert (got.ids, got.finish, got.matched) == expected_output(admit, VOCAB)


def test_logprobs_follow_their_rows() -> None:
    ring = ring_of(pipeline_depth=3)
    stop = token_at(rid_of(1), 2, VOCAB, set(), 0)
    ring.send(make_admit(rid_of(1), [1, 2], 9, stop_ids=[stop]))
    ring.send(make_admit(rid_of(2), [3, 4], 9))
    while ring.plan():
        pass
    results = [ring.worker.results.popleft() for _ in range(3)]
    for number, result in enumerate(results):
        rows = len(column(result.ids))
        payloads = tuple((row, f"{number}/{row}".encode()) for row in range(rows))
        ring.send(msgspec.structs.replace(result, logprobs=payloads))
    emits = [message for _, _, message in ring.scheduler.outgoing() if isinstance(message, Emit)]
    # Request 1 ended with the first result: its rows of later steps are gone, and row 1 became row 0.
    assert [emit.logprobs for emit in emits] == [
        ((0, b"0/0"), (1, b"0/1")),
        ((0, b"1/1"),),
        ((0, b"2/1"),),
    ]


def test_flush_answers_with_the_pages_it_freed() -> None:
    ring = ring_of()
    ring.send(make_admit(rid_of(1), list(range(40)), 2))
    ring.drain()
    ring.send(Flush(rid=rid_of(7, server=3)))
    ring.collect()
    assert ring.others[-1] == (StageKind.SERVER, 3, FlushReply(rid=rid_of(7, server=3), pages=10))
    assert ring.scheduler.counters()["pages_cached"] == 0


def test_a_worker_out_of_step_is_an_error() -> None:
    ring = ring_of()
    ring.send(make_admit(rid_of(1), [1], 5))
    ring.plan()
    result = ring.worker.results.popleft()
    ring.send(msgspec.structs.replace(result, epoch=result.epoch - 1))  # of the scheduler before: dropped
    with pytest.raises(WorkerError, match="result of step 9"):
        ring.send(msgspec.structs.replace(result, step=9))
    with pytest.raises(WorkerError, match="refuses plan 3"):
        ring.send(Desync(epoch=1, step=3, expected_epoch=1, expected_previous=1))
    with pytest.raises(WorkerError, match="sampled 1 rows"):
        ring.send(msgspec.structs.replace(result, ids=np.zeros(2, np.int32).tobytes()))


def test_a_request_that_waits_for_pages_is_passed_by_a_bounded_number() -> None:
    """K58: a head that needs more pages than are free is overtaken, but not for ever."""
    facts = make_facts(num_pages=40, max_model_len=140, page_size=4)
    ring = Ring(make_options(max_num_seqs=16, max_num_batched_tokens=256), facts)
    for number in range(6):
        ring.send(make_admit(rid_of(number), [number] * 5, 14))
    for _ in range(3):
        ring.turn()
    big = rid_of(1000)
    ring.send(make_admit(big, [7] * 120, 4))
    passed = 0
    for number in range(2000, 2500):
        ring.send(make_admit(rid_of(number), [number % 900, 2, 3], 12))
        ring.turn()
        record = ring.received.get((big, 1))
        if record is not None and record.ids:
            break
        passed += 1
    assert 5 < passed < 200
    ring.drain()
    assert all(got.finish is Finish.LENGTH for got in ring.received.values())
