"""Sampling on a device against the CPU's sampler; the same torch operations, run on CPU tensors."""

from typing import Any

import numpy as np
import pytest
import torch

from proto.messages import RowStatus, TokenLogprobs
from tests.test_worker_sampler import assert_distribution, logits_of, make_rows
from worker.cpu.sampler import sample as cpu_sample
from worker.cpu.sampler import token_logprobs as cpu_token_logprobs
from worker.cuda import sampling
from worker.cuda.device import _mode
from worker.cuda.random import philox4x32, uniform
from worker.cuda.sampling import MOST_RANKED, Mode, SamplingTable, finite_rows, sample, token_logprobs
from worker.steps.random import Purpose
from worker.steps.random import uniform as cpu_uniform
from worker.steps.sampling import SamplingRows

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
VOCAB = 1000  # not a multiple of a block
CPU = torch.device("cpu")


def table_of(rows: SamplingRows) -> SamplingTable:
    """A row's parameters in the slot of its number."""
    table = SamplingTable(len(rows.slots), CPU)
    table.words[: len(rows.slots)] = torch.from_numpy(rows.params.view(np.int32).reshape(-1, SamplingTable.WORDS))
    return table


def draw(logits: torch.Tensor, rows: SamplingRows, mode: Mode = Mode.FILTERED) -> tuple[list[int], list[int]]:
    """Ids and statuses."""
    finite = finite_rows(logits)
    logits = logits.clone()
    for row, ids in rows.masked:
        logits[row, torch.from_numpy(ids).long()] = -torch.inf
    # The position on the device is that of the token before the one that is drawn.
    positions = torch.from_numpy(rows.positions - np.int32(1))
    drawn = sample(logits, finite, torch.from_numpy(rows.slots), positions, table_of(rows), mode)
    assert drawn.dtype == torch.int32
    return drawn[:, 0].tolist(), drawn[:, 1].tolist()


def random_logits(count: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    words = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    counter = [torch.tensor([0, 0xFFFFFFFF, word]) for word in words]
    key = [torch.tensor([0, 0xFFFFFFFF, word]) for word in (0xA4093822, 0x299F31D0)]
    result = torch.stack(philox4x32(tuple(counter), tuple(key)), dim=1)  # type: ignore[arg-type]
    assert result.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_the_device_draws_the_numbers_of_the_cpu() -> None:
    generator = np.random.default_rng(1)
    seeds = np.concatenate([generator.integers(0, 2**64, 500, np.uint64), np.array([0, 2**63, 2**64 - 1], np.uint64)])
    positions = generator.integers(0, 2**31 - 1, len(seeds), np.int32)
    ours = uniform(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), Purpose.SAMPLE)
    assert ours.tolist() == cpu_uniform(seeds, positions, Purpose.SAMPLE).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.3, "top_k": 40},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.5, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 1.0, "top_k": VOCAB + 5},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 0.0, "top_k": 3},
    ],
    ids=str,
)
def test_rows_draw_what_the_cpu_draws(params: dict[str, Any]) -> None:
    """The same id, but where the random number falls within rounding of the border between two."""
    logits = random_logits(300)
    rows = make_rows(300, seed=77, **params)
    expected = cpu_sample(logits.numpy(), rows)
    ids, statuses = draw(logits, rows)
    assert statuses == [RowStatus.OK] * 300
    assert np.count_nonzero(expected.ids != ids) <= 1


@pytest.mark.parametrize("equals", [False, True])
def test_rows_of_a_small_top_k_need_no_whole_order(equals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of the full order, and the CPU's; of logits with many equals, too, also at the border of top_k."""
    monkeypatch.setattr(sampling, "MOST_RANKED", 40)
    logits = random_logits(200, seed=5)
    if equals:
        logits = logits.round()
    rows = make_rows(
        200,
        seed=78,
        temperature=[1.0, 2.0, 0.0, 3.0, 1.0] * 40,
        top_k=[1, 7, 40, 40, 0] * 40,
        top_p=[1.0, 0.9, 1.0, 1.0, 1.0] * 40,
        min_p=[0.0, 0.0, 0.0, 0.2, 0.1] * 40,
    )
    ids, statuses = draw(logits, rows, Mode.CUT)
    assert statuses == [RowStatus.OK] * 200
    assert ids == draw(logits, rows, Mode.FILTERED)[0]
    assert np.count_nonzero(cpu_sample(logits.numpy(), rows).ids != ids) <= 1


def test_the_least_mode_that_a_steps_rows_need() -> None:
    def mode(*rows: dict[str, Any]) -> Mode:
        values: dict[str, Any] = {name: [row.get(name, neutral) for row in rows] for name, neutral in NEUTRAL.items()}
        return _mode(make_rows(len(rows), seed=1, **values))

    plain: dict[str, Any] = {}
    greedy, likely = {"temperature": 0.0, "top_p": 0.5, "top_k": 9}, {"min_p": 0.1}
    few, many, mass = {"top_k": MOST_RANKED, "top_p": 0.9}, {"top_k": MOST_RANKED + 1}, {"top_p": 0.9}
    assert mode(greedy) is Mode.GREEDY
    assert mode(greedy, plain) is Mode.PLAIN
    assert mode(greedy, plain, likely) is mode(few, plain) is mode(few, likely, greedy) is Mode.CUT
    assert mode(few, many) is mode(few, mass) is mode(mass) is Mode.FILTERED


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}, {}], ids=str)
def test_distributions(params: dict[str, Any]) -> None:
    logits = torch.from_numpy(logits_of([0.1, 0.4, 0.2, 0.25, 0.05])).expand(4000, 5).contiguous()
    ids, _ = draw(logits, make_rows(4000, seed=5, temperature=1.0, **params))
    expected = {
        "top_k": [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0],
        "top_p": [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0],
        "min_p": [0, 0.4 / 0.85, 0.2 / 0.85, 0.25 / 0.85, 0],
        "": [0.1, 0.4, 0.2, 0.25, 0.05],
    }
    assert_distribution(np.bincount(ids, minlength=5), expected[next(iter(params), "")])


def test_a_row_draws_the_same_whatever_stands_beside_it_and_in_every_mode() -> None:
    """Bit for bit: alone, elsewhere in the batch, beside rows that filter, behind padding."""
    count = 40
    logits = random_logits(count, seed=3)
    mixed = make_rows(
        count, seed=9, temperature=[0.0, 1.0, 0.7, 1.3] * 10, top_k=[0, 0, 5, 0] * 10, top_p=[1.0, 1.0, 0.9, 0.6] * 10
    )
    ids, _ = draw(logits, mixed)
    order = np.random.default_rng(0).permutation(count)
    shuffled = SamplingRows(np.arange(count, dtype=np.int32), mixed.positions[order], mixed.params[order], [])
    assert draw(logits[order], shuffled)[0] == [ids[i] for i in order]
    for row, mode in ((0, Mode.GREEDY), (1, Mode.PLAIN), (2, Mode.CUT), (2, Mode.FILTERED), (3, Mode.FILTERED)):
        alone = SamplingRows(np.zeros(1, np.int32), mixed.positions[row : row + 1], mixed.params[row : row + 1], [])
        assert draw(logits[row : row + 1], alone, mode)[0] == [ids[row]]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 400:] = 2.0
    assert draw(logits, make_rows(2), Mode.GREEDY)[0] == [0, 400]


def test_masked_ids_are_not_drawn_and_do_not_make_a_row_bad() -> None:
    logits = random_logits(4, seed=4)
    best = logits.argmax(dim=1)
    masked = {0: [int(best[0])], 2: [int(best[2])], 3: list(range(VOCAB))}
    rows = make_rows(4, masked=masked, temperature=[0.0, 0.0, 1.0, 1.0], top_k=[0, 0, 2, 0], seed=3)
    expected = cpu_sample(logits.numpy(), rows)
    ids, statuses = draw(logits, rows)
    assert ids == expected.ids.tolist()
    assert ids[0] != int(best[0])
    assert statuses == [RowStatus.OK, RowStatus.OK, RowStatus.OK, RowStatus.NOT_FINITE]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_is_named_and_its_neighbours_unharmed(mode: Mode, poison: float) -> None:
    logits = random_logits(5, seed=6)
    temperature = 0.0 if mode is Mode.GREEDY else 1.0
    rows = make_rows(5, temperature=temperature, top_k=4 if mode is Mode.FILTERED else 0, seed=1)
    clean, _ = draw(logits, rows, mode)
    logits[2, 17] = poison
    logits[3] = poison
    ids, statuses = draw(logits, rows, mode)
    assert statuses == [0, 0, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE, 0]
    assert ids == [clean[0], clean[1], 0, 0, clean[4]]


@pytest.mark.parametrize("count", [0, 1, 20])
def test_log_probabilities_are_the_cpus(count: int) -> None:
    logits = random_logits(6, seed=8)
    logits[0, 500:] = 5.0  # equals at the top
    chosen = [3, 999, 0, 17, 500, 250]
    ids, top, offsets = token_logprobs(logits, count)
    for row, id_ in enumerate(chosen):
        expected: TokenLogprobs = cpu_token_logprobs(logits[row].numpy(), id_, count)
        assert ids[row].numpy().tobytes() == expected.top_ids[0]
        assert top[row].tolist() == pytest.approx(list(expected.top_logprobs[0]), abs=1e-5)
        assert float(logits[row, id_].double() - offsets[row]) == pytest.approx(expected.chosen[0], abs=1e-5)
