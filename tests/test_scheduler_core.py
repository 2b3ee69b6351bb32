"""The scheduler against a fake worker that remembers what its pages hold: one behaviour a test."""

import msgspec
import numpy as np
import pytest

from proto.ids import Address, StageKind
from proto.messages import (
    U64,
    Desync,
    Emit,
    Finish,
    Flush,
    FlushReply,
    RejectCode,
    WorkClass,
    column,
)
from scheduler.results import WorkerError
from tests.builders import make_facts, make_scheduler_options, make_stage, make_world
from tests.scheduler_fakes import MS, Ring, expected_output, make_admit, rid_of, ring_of, token_at

DEPTHS = [1, 2, 3]
VOCAB = make_facts().vocab_size


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


# ------------------------------------------------------------------ refusals


def test_what_can_never_fit_is_refused_and_the_queue_advances() -> None:
    """K20."""
    ring = Ring(make_scheduler_options(), make_facts(num_pages=20, max_model_len=200))
    ring.send(make_admit(rid_of(1), [1] * 10, 72))
    ring.collect()
    reject = ring.received[rid_of(1), 1].reject
    assert reject is not None
    assert (reject.code, reject.field) == (RejectCode.INVALID, "stopping.max_new_tokens")
    assert "10 prompt tokens and max_new_tokens (72) need 21 KV pages" in reject.message
    ring.send(make_admit(rid_of(4), [1] * 10, 71))  # 80 K/V: exactly the pool
    ring.send(make_admit(rid_of(5), [2] * 10, 5))
    ring.drain()
    assert len(ring.received[rid_of(4), 1].ids) == 71
    assert len(ring.received[rid_of(5), 1].ids) == 5


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
    ring = Ring(make_scheduler_options(pipeline_depth=depth, max_num_batched_tokens=16))
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
    ring = Ring(make_scheduler_options(pipeline_depth=depth, chunked_prefill=False, max_num_batched_tokens=64))
    ring.keep_plans = True
    ring.send(make_admit(rid_of(1), [1] * 65, 3))
    ring.send(make_admit(rid_of(2), [2, 3], 60))
    ring.send(make_admit(rid_of(3), [4, 5], 60))
    ring.turn()
    ring.send(make_admit(rid_of(4), list(range(64)), 3))  # fits only a step without decodes
    ring.drain()
    reject = ring.received[rid_of(1), 1].reject
    assert reject is not None
    assert reject.message.startswith("must have at most 64 tokens, not 65")
    sizes = [int(count) for plan in ring.plans for _, count, _ in column(plan.chunks).reshape(-1, 3)]
    assert 64 in sizes
    assert ring.received[rid_of(4), 1].ended_at < ring.received[rid_of(3), 1].ended_at


def test_fewer_tokens_a_step_than_rows_still_serves_all() -> None:
    ring = ring_of(max_num_batched_tokens=3, max_num_seqs=8)
    for number in range(8):
        ring.send(make_admit(rid_of(number), [number] * 7, 6))
    ring.drain()
    assert all(len(got.ids) == 6 for got in ring.received.values())


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
        for to, message in ring.scheduler.outgoing():
            assert to.kind is StageKind.DETOKENIZER
            assert isinstance(message, Emit)
            take(message)
            for rid in column(message.rids, U64).tolist():
                places.setdefault(rid, set()).add(to.index)
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
    emits = [message for _, message in ring.scheduler.outgoing() if isinstance(message, Emit)]
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
    assert ring.others[-1] == (Address(StageKind.SERVER, 3), FlushReply(rid=rid_of(7, server=3), pages=10))
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
    ring = Ring(make_scheduler_options(max_num_seqs=16, max_num_batched_tokens=256), facts)
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
