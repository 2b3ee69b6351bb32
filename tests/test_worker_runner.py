"""The runner over a forward pass of a few lines: last tokens, refusals, poisoned rows."""

import pytest
import torch

from proto.messages import Desync, Reset, RowStatus, StepPlan, StepResult, column
from tests.builders import i32, make_plan, make_row, make_worker_options
from worker.cpu.device import CpuDevice
from worker.device import facts_of
from worker.steps.batch import StepBatch

VOCAB = 50


class SumForward:
    """Wants the id after token t at position p to be t + p. `poisoned` positions give NaN."""

    def __init__(self) -> None:
        self.poisoned: set[int] = set()
        self.fed: list[list[int]] = []

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        self.fed.append(batch.token_ids.tolist())
        tokens, positions = batch.token_ids[batch.logit_tokens], batch.positions[batch.logit_tokens]
        logits = torch.zeros(len(tokens), VOCAB)
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            logits[row, (token + position) % VOCAB] = 9.0
            if position in self.poisoned:
                logits[row, 3] = torch.nan
        return logits


def make_device(forward: SumForward) -> CpuDevice:
    facts = facts_of(make_worker_options(), dtype="float32", kv_element_bytes=4, pages=(64, 0), window=0)
    return CpuDevice(facts, forward)


def make_runner() -> tuple[CpuDevice, SumForward]:
    forward = SumForward()
    runner = make_device(forward)
    runner.reset(1)
    return runner, forward


def ids_of(answer: StepResult | Desync | None) -> list[int]:
    assert isinstance(answer, StepResult)
    return [int(i) for i in column(answer.ids)]


def test_sampled_ids_are_the_input_of_the_next_step() -> None:
    runner, forward = make_runner()
    start = make_plan(admits=(make_row(4, [10, 11], [0]), make_row(1, [20], [1])), chunks=i32(4, 2, 1, 1, 1, 1))
    assert ids_of(runner.step(start)) == [12, 20]
    assert ids_of(runner.step(make_plan(step=2, decode_slots=i32(1, 4)))) == [21, 14]
    assert ids_of(runner.step(make_plan(step=3))) == [23, 17]
    assert forward.fed == [[10, 11, 20], [20, 12], [21, 14]]


def test_a_slot_that_is_used_again_starts_from_its_own_ids() -> None:
    runner, forward = make_runner()
    runner.step(make_plan(admits=(make_row(0, [10], [0]),), chunks=i32(0, 1, 1)))
    runner.step(make_plan(step=2, released=i32(0), admits=(make_row(0, [30, 31], [0]),), chunks=i32(0, 2, 1)))
    assert ids_of(runner.step(make_plan(step=3, decode_slots=i32(0)))) == [34]
    assert forward.fed == [[10], [30, 31], [32]]


def test_steps_without_samples_or_without_rows_give_a_result_too() -> None:
    runner, forward = make_runner()
    result = runner.step(make_plan(admits=(make_row(0, [1, 2, 3], [0]),), chunks=i32(0, 2, 0)))
    assert ids_of(result) == []
    assert ids_of(runner.step(make_plan(step=2, released=i32(0)))) == []
    assert len(forward.fed) == 1


def test_a_break_in_the_numbers_is_told_once_and_refused_until_reset() -> None:
    runner, forward = make_runner()
    admit = make_plan(admits=(make_row(0, [1], [0]),), chunks=i32(0, 1, 1))
    runner.step(admit)
    lost = make_plan(step=3, decode_slots=i32(0))  # previous is 2, which never came
    assert runner.step(lost) == Desync(epoch=1, step=3, expected_epoch=1, expected_previous=1)
    assert runner.step(make_plan(step=4)) is None
    assert runner.step(make_plan(step=2, decode_slots=i32(0))) is None  # it would fit, but comes too late
    assert len(forward.fed) == 1
    runner.reset(Reset(epoch=2).epoch)
    assert runner.step(admit) == Desync(epoch=1, step=1, expected_epoch=2, expected_previous=0)
    runner.reset(1)
    assert ids_of(runner.step(admit)) == [1]


def test_a_worker_that_was_never_reset_asks_for_it() -> None:
    runner = make_device(SumForward())
    plan = make_plan(admits=(make_row(0, [1], [0]),), chunks=i32(0, 1, 1))
    assert isinstance(runner.step(plan), Desync)


def test_a_poisoned_row_is_named_and_its_neighbour_unharmed() -> None:
    runner, forward = make_runner()
    forward.poisoned = {2}
    start = make_plan(admits=(make_row(0, [10, 11, 12], [0]), make_row(1, [20], [1])), chunks=i32(0, 3, 1, 1, 1, 1))
    result = runner.step(start)
    assert ids_of(result) == [0, 20]
    assert isinstance(result, StepResult)
    assert list(result.statuses) == [RowStatus.NOT_FINITE, RowStatus.OK]
    # A plan made before the result was read decodes both: the row computes on, harmlessly.
    forward.poisoned = set()
    result = runner.step(make_plan(step=2, decode_slots=i32(0, 1)))
    assert ids_of(result)[1] == 21
    assert isinstance(result, StepResult)
    assert result.statuses == b""


def test_the_tap_sees_every_batch_with_its_logits() -> None:
    runner, _ = make_runner()
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    runner.on_logits = lambda batch, logits: seen.append((batch.positions.tolist(), tuple(logits.shape)))
    runner.step(make_plan(admits=(make_row(0, [1, 2], [0]),), chunks=i32(0, 2, 1)))
    runner.step(make_plan(step=2, decode_slots=i32(0)))
    assert seen == [([0, 1], (1, VOCAB)), ([2], (1, VOCAB))]


def test_time_without_requests_is_not_idle_time() -> None:
    runner, _ = make_runner()
    runner.step(make_plan(admits=(make_row(0, [1], [0]),), chunks=i32(0, 1, 1)))
    waited = runner.step(make_plan(step=2, decode_slots=i32(0)))
    ended = runner.step(make_plan(step=3, released=i32(0), decode_slots=b""))
    again = runner.step(make_plan(step=4, admits=(make_row(0, [1], [0]),), chunks=i32(0, 1, 1)))
    for result, idle in ((waited, True), (ended, False), (again, False)):
        assert isinstance(result, StepResult)
        assert (result.idle_ns > 0) is idle
    counters = runner.clock.counters()
    assert counters["steps"] == 4
    assert counters["tokens"] == 3
    assert 0 < counters["device_busy_share"] < 1
    assert counters["device_idle_seconds"] > 0


@pytest.mark.parametrize(
    ("flag", "pages", "expected"), [(None, 64, 40), (30, 64, 30), (None, 5, 20), (100, 64, 100), (100, 5, 20)]
)
def test_facts_give_the_smallest_limit(flag: int | None, pages: int, expected: int) -> None:
    """K18: the flag, the model (40) where there is none, or the pool (4 tokens a page)."""
    options = make_worker_options(max_model_len=flag)
    facts = facts_of(options, dtype="float32", kv_element_bytes=4, pages=(pages, 0), window=0)
    assert facts.max_model_len == expected
    assert facts.num_pages == pages
    assert facts.vocab_size == VOCAB


def test_greedy_rows_beside_a_row_with_foreign_stop_ids_keep_their_tokens() -> None:
    """K23."""
    alone, _ = make_runner()
    beside, _ = make_runner()
    mine = make_row(0, [5, 6], [0])
    foreign = make_row(1, [7], [1], min_len=9, stops=(-1, VOCAB, VOCAB + 10**6, 2**31 - 1))
    plans: list[StepPlan] = [
        make_plan(admits=(mine,), chunks=i32(0, 2, 1)),
        make_plan(admits=(mine, foreign), chunks=i32(0, 2, 1, 1, 1, 1)),
    ]
    one, other = ids_of(alone.step(plans[0])), ids_of(beside.step(plans[1]))
    for step in range(2, 4):
        assert other[0] == one[0]
        one = ids_of(alone.step(make_plan(step=step, decode_slots=i32(0))))
        other = ids_of(beside.step(make_plan(step=step, decode_slots=i32(0, 1))))
    assert other[0] == one[0]
