"""The sampler against distributions computed by hand, and a row's independence of its batch."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from proto.messages import RowStatus, TokenLogprobs
from proto.parameters import GREEDY_TEMPERATURE
from worker.cpu.sampler import Sampled, sample
from worker.steps.random import Purpose, philox4x32, uniform
from worker.steps.sampling import SAMPLING, SamplingRows

F32 = npt.NDArray[np.float32]


def make_rows(count: int, masked: dict[int, list[int]] | None = None, **params: Any) -> SamplingRows:
    """Rows with parameters given as scalars or as lists, one a row."""
    table = np.zeros(count, SAMPLING)
    table["top_p"] = 1.0
    table["logprobs"] = -1
    positions = np.asarray(params.pop("positions", np.arange(count)), np.int32)
    for name, value in params.items():
        table[name] = value
    slots = np.arange(count, dtype=np.int32)
    return SamplingRows(slots, positions, table, [(r, np.array(i, np.int32)) for r, i in (masked or {}).items()])


def logits_of(probabilities: list[float]) -> F32:
    result: F32 = np.log(np.array(probabilities)).astype(np.float32)
    return result


def draw_many(logits: F32, count: int = 4000, **params: Any) -> npt.NDArray[np.int64]:
    """How often each id was drawn, in `count` rows that differ in nothing but their position."""
    result = sample(np.tile(logits, (count, 1)), make_rows(count, seed=1234, **params))
    return np.bincount(result.ids, minlength=len(logits))


def assert_distribution(counts: npt.NDArray[np.int64], expected: list[float]) -> None:
    """Chi-square at a level of about 1e-6, by Wilson and Hilferty's normal approximation; seeds are fixed."""
    probabilities = np.array(expected)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    mean = counts.sum() * probabilities[kept]
    statistic = float(((counts[kept] - mean) ** 2 / mean).sum())
    freedom = int(kept.sum()) - 1
    if freedom == 0:
        return
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert normal < 4.75, f"chi-square {statistic} with {freedom} degrees of freedom: {counts} against {mean}"


# --------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: list[int], key: list[int], words: list[int]) -> None:
    result = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert result.tolist() == [words]


def test_uniform_depends_on_each_of_its_arguments_alone() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1], np.uint64)
    numbers = uniform(np.repeat(seeds, 500), np.tile(np.arange(500), 4), Purpose.SAMPLE)
    assert len(np.unique(numbers)) == 2000
    assert 0 <= numbers.min() < 0.01 < 0.99 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    alone = uniform(seeds[2:3], np.array([17]), Purpose.SAMPLE)
    assert alone[0] == numbers[2 * 500 + 17]
    other_index = uniform(seeds[2:3], np.array([17]), Purpose.SAMPLE, np.array([1]))
    assert other_index[0] != alone[0]


# --------------------------------------------------------------------------- distributions


BASE = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, BASE),
        ({"temperature": 0.5}, [p**2 / 0.285 for p in BASE]),
        ({"temperature": 2.0}, [p**0.5 / sum(q**0.5 for q in BASE) for p in BASE]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 99}, BASE),
        ({"top_k": -1}, BASE),
        ({"top_p": 0.4001}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.3}, [1, 0, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.84}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"min_p": 0.3}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        # top_p counts in what top_k left: 0.4/0.85 and 0.3/0.85 are 0.82 of it
        ({"top_k": 3, "top_p": 0.8}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_k": 4, "top_p": 0.85, "min_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        # temperature comes first: the square of BASE has 0.56 of its mass in the first id
        ({"temperature": 0.5, "top_p": 0.55}, [1, 0, 0, 0, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any], expected: list[float]) -> None:
    assert_distribution(draw_many(logits_of(BASE), **{"temperature": 1.0, **params}), expected)


def test_top_p_looks_beyond_its_first_guess_of_a_flat_distribution() -> None:
    """20 000 equal ids: half of the mass is the 10 000 lowest."""
    counts = draw_many(np.zeros(20_000, np.float32), count=300, temperature=1.0, top_p=0.5)
    assert counts[10_000:].sum() == 0
    assert counts[5_000:10_000].sum() > 100


def test_draws_are_right_across_a_large_vocabulary() -> None:
    """1 000 ids, all mass on five of them, the first and the last among these; blocks between hold nothing."""
    logits = np.full(1000, -200.0, np.float32)
    ids = [0, 255, 256, 700, 999]
    logits[ids] = np.log(BASE)
    counts = draw_many(logits, temperature=1.0)
    assert counts.sum() == counts[ids].sum()
    assert_distribution(counts[ids], BASE)


def test_equal_logits_break_ties_towards_the_lowest_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 3.0]], np.float32)
    assert sample(logits, make_rows(1)).ids.tolist() == [1]
    counts = draw_many(logits[0], count=500, temperature=1.0, top_k=2)
    assert counts[0] == counts[3] == 0
    assert counts[1] > 150 < counts[2]


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, GREEDY_TEMPERATURE / 2, 1e-4, 1e-2])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """K22. Above the limit the arithmetic stays finite and the gap of 0.1 decides all the same."""
    logits = np.array([5.0, 5.1, -40.0, 4.0], np.float32)
    counts = draw_many(logits, count=200, temperature=temperature)
    assert counts[1] == 200 or (temperature == 1e-2 and counts[1] + counts[0] == 200 and counts[0] < 5)


# --------------------------------------------------------------------------- rows


def mixed_rows(count: int) -> dict[str, Any]:
    """Every combination of filters, greedy rows between."""
    pick = np.arange(count)
    return {
        "temperature": np.where(pick % 3 == 0, 0.0, 0.7 + 0.1 * (pick % 5)),
        "top_k": np.where(pick % 2 == 0, 0, 40),
        "top_p": np.where(pick % 5 < 2, 1.0, 0.9),
        "min_p": np.where(pick % 7 < 4, 0.0, 0.02),
        "seed": pick.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
        "logprobs": np.where(pick % 4 == 0, 5, -1),
    }


def test_a_row_does_not_depend_on_its_batch() -> None:
    """K25, bit by bit: alone, in another order, and at another alignment (the vocabulary is odd)."""
    count, vocab = 24, 5003
    logits = np.random.default_rng(3).normal(0, 3, (count, vocab)).astype(np.float32)
    params = mixed_rows(count)
    positions = np.arange(count) * 11
    together = sample(logits, make_rows(count, positions=positions, **params))
    payloads = dict(together.logprobs)
    order = np.random.default_rng(4).permutation(count)
    shuffled = sample(
        logits[order], make_rows(count, positions=positions[order], **{k: v[order] for k, v in params.items()})
    )
    assert shuffled.ids.tolist() == together.ids[order].tolist()
    assert {int(order[row]): data for row, data in shuffled.logprobs} == payloads
    for row in range(count):
        one = slice(row, row + 1)
        alone = sample(
            logits[one].copy(), make_rows(1, positions=positions[one], **{k: v[one] for k, v in params.items()})
        )
        assert alone.ids[0] == together.ids[row]
        assert dict(alone.logprobs).get(0) == payloads.get(row)


def test_logits_are_left_as_they_were() -> None:
    logits = np.random.default_rng(5).normal(0, 1, (2, 9)).astype(np.float32)
    before = logits.copy()
    sample(logits, make_rows(2, masked={0: [1], 1: [2]}, temperature=[0.0, 1.0], logprobs=3))
    assert (logits == before).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_are_masked_before_min_tokens_and_exactly_then(temperature: float) -> None:
    """K14 and K23: the neighbour, who wants the same id and is not masked, gets it."""
    logits = np.tile(np.array([0.0, 50.0, 1.0], np.float32), (2, 1))
    result = sample(logits, make_rows(2, masked={0: [1]}, temperature=temperature))
    assert result.ids[0] != 1
    assert result.ids[1] == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_fails_alone(poison: float, temperature: float) -> None:
    logits = np.random.default_rng(6).normal(0, 2, (3, 100)).astype(np.float32)
    healthy = sample(logits, make_rows(3, temperature=temperature, logprobs=2))
    logits[1, 42] = poison
    result = sample(logits, make_rows(3, temperature=temperature, logprobs=2))
    assert result.statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK]
    assert result.ids.tolist() == [healthy.ids[0], 0, healthy.ids[2]]
    assert [pair for pair in healthy.logprobs if pair[0] != 1] == list(result.logprobs)


def test_a_row_with_nothing_left_to_draw_fails() -> None:
    result = sample(np.zeros((1, 3), np.float32), make_rows(1, masked={0: [0, 1, 2]}, temperature=1.0))
    assert result.statuses.tolist() == [RowStatus.NOT_FINITE]


# --------------------------------------------------------------------------- logprobs


def logprobs_of(result: Sampled, row: int = 0) -> TokenLogprobs:
    return msgspec.msgpack.decode(dict(result.logprobs)[row], type=TokenLogprobs)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    """K34: temperature, top_k and masks do not touch them. The chosen id need not be among the top."""
    rows = make_rows(1, masked={0: [0]}, temperature=0.3, top_k=1, logprobs=2)
    result = sample(logits_of(BASE)[None], rows)
    entry = logprobs_of(result)
    assert result.ids.tolist() == [1]
    assert entry.chosen == pytest.approx([np.log(0.3)], abs=1e-6)
    assert np.frombuffer(entry.top_ids[0], np.int32).tolist() == [0, 1]
    assert entry.top_logprobs[0] == pytest.approx([np.log(0.4), np.log(0.3)], abs=1e-6)


def test_logprobs_give_as_many_as_there_are() -> None:
    """K33: masked ids keep their raw log-probability, so every entry is finite; k above the vocabulary gives all."""
    result = sample(logits_of(BASE)[None], make_rows(1, masked={0: [0, 1, 2, 3]}, logprobs=20))
    entry = logprobs_of(result)
    assert result.ids.tolist() == [4]
    assert np.frombuffer(entry.top_ids[0], np.int32).tolist() == [0, 1, 2, 3, 4]
    assert np.isfinite(entry.top_logprobs[0]).all()


def test_logprobs_zero_names_the_chosen_id_only() -> None:
    result = sample(np.tile(logits_of(BASE), (2, 1)), make_rows(2, logprobs=[0, -1]))
    entry = logprobs_of(result)
    assert entry.chosen == pytest.approx([np.log(0.4)], abs=1e-6)
    assert entry.top_ids == (b"",)
    assert entry.top_logprobs == ((),)
    assert 1 not in dict(result.logprobs)
