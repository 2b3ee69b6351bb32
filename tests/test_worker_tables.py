"""Slot tables against a model that keeps one plain list for each row."""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.messages import AdmitRow, StepPlan
from tests.builders import behind_window, i32, make_plan, make_row
from worker.steps.batch import StepBatch
from worker.steps.sequence import PlanError
from worker.steps.tables import SlotTables

PAGE = 4
SLOTS = 6
POOL = 64
MAX_LEN = 40
VOCAB = 50


def make_tables(max_step_ids: int = 1) -> SlotTables:
    return SlotTables(
        max_slots=SLOTS,
        num_pages=POOL,
        page_size=PAGE,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        max_step_ids=max_step_ids,
    )


@dataclass
class Row:
    """One request of the naive model."""

    ids: list[int]
    length: int
    pages: list[int]
    sampled: bool = False
    min_len: int = 0


@dataclass
class Naive:
    """Makes random valid plans and says what their batch must be."""

    rng: random.Random
    rows: dict[int, Row] = field(default_factory=dict)
    decoding: list[int] = field(default_factory=list)
    step: int = 0

    def plan(self) -> tuple[StepPlan, list[tuple[int, list[int], list[int], bool]]]:
        """The plan, and its rows as (slot, token ids, positions, samples)."""
        rng = self.rng
        self.step += 1
        released = [slot for slot in list(self.rows) if rng.random() < 0.1]
        for slot in released:
            del self.rows[slot]
        admits = self._admits()
        appends: list[tuple[int, int]] = []
        decode = [s for s in self.rows if self.rows[s].sampled and self.rows[s].length < MAX_LEN]
        if rng.random() < 0.3:
            rng.shuffle(decode)
            decode = decode[: rng.randint(0, len(decode))]
        elif set(decode) == set(self.decoding):
            decode = self.decoding
        same = decode == self.decoding and rng.random() < 0.9
        self.decoding = decode
        expected: list[tuple[int, list[int], list[int], bool]] = []
        for slot in decode:
            row = self.rows[slot]
            self._grow(slot, row.length + 1, appends)
            expected.append((slot, [0], [row.length], True))
            row.length += 1
        chunks = self._chunks(expected, appends)
        rng.shuffle(appends)  # between slots; each slot's own pages must stay in order
        appends.sort(key=lambda pair: self.rows[pair[0]].pages.index(pair[1]))
        plan = make_plan(
            step=self.step,
            released=i32(*released),
            admits=admits,
            append_slots=i32(*(slot for slot, _ in appends)),
            append_pages=i32(*(page for _, page in appends)),
            decode_slots=None if same else i32(*decode),
            chunks=i32(*chunks),
        )
        return plan, expected

    def _admits(self) -> tuple[AdmitRow, ...]:
        admits = []
        for slot in range(SLOTS):
            if slot not in self.rows and self.rng.random() < 0.4:
                ids = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, MAX_LEN - 8))]
                start = self.rng.randrange(len(ids)) // PAGE * PAGE
                pages = self._draw_pages(start // PAGE + self.rng.randint(0, 1), [])
                min_len = len(ids) + self.rng.randint(0, 3)
                self.rows[slot] = Row(ids, start, pages, min_len=min_len)
                admits.append(make_row(slot, ids, pages, start, min_len))
        return tuple(admits)

    def _draw_pages(self, count: int, used: list[int]) -> list[int]:
        return self.rng.sample([page for page in range(POOL) if page not in used], count)

    def _grow(self, slot: int, length: int, appends: list[tuple[int, int]]) -> None:
        row = self.rows[slot]
        missing = -(-length // PAGE) - len(row.pages)
        pages = self._draw_pages(max(missing, 0), row.pages)
        row.pages += pages
        appends += [(slot, page) for page in pages]

    def _chunks(
        self, expected: list[tuple[int, list[int], list[int], bool]], appends: list[tuple[int, int]]
    ) -> list[int]:
        chunks: list[int] = []
        for slot, row in self.rows.items():
            if row.length < len(row.ids) and self.rng.random() < 0.7:
                count = self.rng.randint(1, len(row.ids) - row.length)
                end = row.length + count
                sample = end == len(row.ids)
                self._grow(slot, end, appends)
                expected.append((slot, row.ids[row.length : end], list(range(row.length, end)), sample))
                chunks += [slot, count, int(sample)]
                row.length, row.sampled = end, sample
        return chunks


def check(batch: StepBatch, expected: list[tuple[int, list[int], list[int], bool]], rows: dict[int, Row]) -> None:
    assert batch.slots.tolist() == [slot for slot, *_ in expected]
    assert batch.token_ids.tolist() == [i for _, ids, _, _ in expected for i in ids]
    assert batch.positions.tolist() == [p for _, _, positions, _ in expected for p in positions]
    wanted = []
    total = 0
    for r, (slot, ids, positions, sample) in enumerate(expected):
        pages = rows[slot].pages
        tokens = slice(int(batch.qo_indptr[r]), int(batch.qo_indptr[r + 1]))
        assert (tokens.start, tokens.stop) == (total, total + len(ids))
        total += len(ids)
        assert batch.kv_slots[tokens].tolist() == [pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        used = positions[-1] // PAGE + 1
        assert batch.kv_indices[batch.kv_indptr[r] : batch.kv_indptr[r + 1]].tolist() == pages[:used]
        assert batch.last_page_len[r] == positions[-1] % PAGE + 1
        if sample:
            wanted.append(total - 1)
    assert batch.logit_tokens.tolist() == wanted
    assert len(batch.kv_indices) == batch.kv_indptr[-1]
    for array in (batch.token_ids, batch.positions, batch.kv_slots, batch.qo_indptr, batch.kv_indptr):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_batches_equal_those_of_a_naive_model(seed: int, steps: int) -> None:
    naive, tables = Naive(random.Random(seed)), make_tables()
    for _ in range(steps):
        plan, expected = naive.plan()
        batch = tables.apply(plan)
        check(batch, expected, naive.rows)
        assert batch.decode_rows == len(naive.decoding)
        rows = tables.sampling_rows(batch)
        sampled = [(slot, positions[-1] + 1) for slot, _, positions, sample in expected if sample]
        assert list(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)) == sampled
        early = [r for r, (slot, position) in enumerate(sampled) if position < naive.rows[slot].min_len]
        assert [row for row, _ in rows.masked] == early


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_device_can_keep_page_tables_of_its_own(seed: int, steps: int) -> None:
    """Pages placed plan by plan give the lists of the host, and an unchanged version stands for unchanged lists."""
    naive, listed = Naive(random.Random(seed)), make_tables()
    width = MAX_LEN // PAGE + 1
    told = SlotTables(
        max_slots=SLOTS, num_pages=POOL, page_size=PAGE, max_model_len=MAX_LEN, vocab_size=VOCAB, lists_pages=False
    )
    kept = np.full(SLOTS * width, -1, np.int32)
    versions: dict[int, list[int]] = {}
    for _ in range(steps):
        plan, _ = naive.plan()
        expected, batch = listed.apply(plan), told.apply(plan)
        places, pages = told.placed_pages(0)
        assert len(set(places.tolist())) == len(places)
        kept[places] = pages
        assert batch.kv_indptr.tolist() == expected.kv_indptr.tolist()
        assert not len(batch.kv_indices) + len(batch.kv_slots)
        counts = np.diff(batch.kv_indptr)
        found = [page for slot, n in zip(batch.slots, counts, strict=True) for page in kept[slot * width :][:n]]
        assert found == expected.kv_indices.tolist()
        assert versions.setdefault(batch.list_version, found) == found
        assert 0 < batch.list_version == expected.list_version


def test_the_version_of_lists_changes_only_where_a_row_enters_a_page() -> None:
    tables = make_tables()
    tables.apply(make_plan(admits=(make_row(2, [1, 2], [7]),), chunks=i32(2, 2, 1)))
    versions = [tables.apply(make_plan(step=2, decode_slots=i32(2))).list_version]
    versions.append(tables.apply(make_plan(step=3)).list_version)
    versions.append(tables.apply(make_plan(step=4, append_slots=i32(2), append_pages=i32(9))).list_version)
    versions.append(tables.apply(make_plan(step=5)).list_version)
    first, _, second, _ = versions
    assert versions == [first, first, second, second]
    assert first != second


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60), window=st.integers(1, MAX_LEN), alone=st.booleans())
@settings(max_examples=100, deadline=None)
def test_lists_behind_a_window_begin_where_the_first_id_sees(seed: int, steps: int, window: int, alone: bool) -> None:
    naive, full = Naive(random.Random(seed)), make_tables()
    both = SlotTables(
        max_slots=SLOTS,
        num_pages=0 if alone else POOL,
        page_size=PAGE,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        window=window,
        window_pages=POOL,
    )
    for _ in range(steps):
        plan, _ = naive.plan()
        expected, batch = full.apply(plan), both.apply(behind_window(plan, window, alone))
        lists = batch.windowed
        assert lists is not None
        assert batch.kv_indices.tolist() == ([] if alone else expected.kv_indices.tolist())
        assert lists.kv_slots.tolist() == expected.kv_slots.tolist()
        for row in range(len(expected.slots)):
            first = max((int(expected.positions[expected.qo_indptr[row]]) - window + 1) // PAGE, 0)
            assert lists.first_pages[row] == first
            all_pages = expected.kv_indices[expected.kv_indptr[row] : expected.kv_indptr[row + 1]]
            own = lists.kv_indices[lists.kv_indptr[row] : lists.kv_indptr[row + 1]]
            assert own.tolist() == all_pages[first:].tolist()
        for array in (lists.kv_slots, lists.kv_indptr, lists.kv_indices, lists.first_pages):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_what_does_not_fit_the_window_is_refused() -> None:
    tables = SlotTables(
        max_slots=SLOTS, num_pages=0, page_size=PAGE, max_model_len=MAX_LEN, vocab_size=VOCAB, window=6, window_pages=9
    )
    row = make_row(0, [1] * 20, [], start=12)
    for pages, start, text in [
        (i32(1), 12, "12 ids cached, 1 pages of them in a window of 6"),
        (i32(1, 2, 3), 12, "12 ids cached, 3 pages"),
        (i32(1, 2), 11, "11 ids cached, 2 pages"),
        (i32(1, 9), 12, "page 9 is outside the pool 0..8"),
    ]:
        admit = msgspec.structs.replace(row, window_pages=pages, start=start)
        with pytest.raises(PlanError, match=text):
            tables.apply(make_plan(admits=(admit,)))
    with pytest.raises(PlanError, match="pages of a cache group that this model does not have"):
        tables.apply(make_plan(admits=(msgspec.structs.replace(row, pages=i32(1, 2, 3)),)))
    tables.apply(make_plan(admits=(msgspec.structs.replace(row, window_pages=i32(1, 2)),)))
    with pytest.raises(PlanError, match="cache group 0, which this model does not have"):
        tables.apply(make_plan(step=2, append_slots=i32(0), append_pages=i32(3)))
    with pytest.raises(PlanError, match="prefills slot 0 up to position 13; it has 3 pages"):
        tables.apply(make_plan(step=2, chunks=i32(0, 1, 0)))


def test_steady_decode_crosses_pages_without_a_new_row_order() -> None:
    """The same rows for 20 steps: the batch that is carried on equals one that is built anew."""
    carried, anew = make_tables(), make_tables()
    start = make_plan(admits=(make_row(0, [1, 2, 3], [5]), make_row(3, [1] * 6, [7, 8])), chunks=i32(0, 3, 1, 3, 6, 1))
    carried.apply(start)
    anew.apply(start)
    lengths, pages, fresh = {0: 3, 3: 6}, {0: 1, 3: 2}, 10
    for step in range(2, 22):
        slots, new = [], []
        for slot in (3, 0):
            if lengths[slot] == pages[slot] * PAGE:
                slots.append(slot)
                new.append(fresh)
                fresh += 1
                pages[slot] += 1
            lengths[slot] += 1
        order = i32(3, 0)
        plans = [
            make_plan(step=step, append_slots=i32(*slots), append_pages=i32(*new), decode_slots=decode_slots)
            for decode_slots in (order if step == 2 else None, order)
        ]
        one, other = carried.apply(plans[0]), anew.apply(plans[1])
        for name in StepBatch.__dataclass_fields__.keys() - {"list_version"}:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_a_released_slot_and_page_serve_again_in_the_same_plan() -> None:
    tables = make_tables()
    tables.apply(make_plan(admits=(make_row(2, [1, 2], [9]),), chunks=i32(2, 2, 1)))
    batch = tables.apply(make_plan(step=2, released=i32(2), admits=(make_row(2, [4, 5, 6], [9]),), chunks=i32(2, 3, 1)))
    assert batch.token_ids.tolist() == [4, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.kv_indices.tolist() == [9]


READY = make_plan(admits=(make_row(0, [1, 2], [3]), make_row(1, [1] * 6, [4, 5])), chunks=i32(0, 2, 1, 1, 4, 0))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (make_plan(step=2, released=i32(4)), "plan 2 of epoch 1: releases slot 4, which holds no request"),
        (make_plan(step=2, released=i32(-1)), "releases slot -1"),
        (make_plan(step=2, admits=(make_row(0, [1], [6]),)), "admits to slot 0, which is in use"),
        (make_plan(step=2, admits=(make_row(SLOTS, [1], [6]),)), "admits to slot 6; slots are 0..5"),
        (make_plan(step=2, admits=(make_row(2, [1, VOCAB], [6]),)), "token id outside 0..49"),
        (make_plan(step=2, admits=(make_row(2, [1], [POOL]),)), "page 64 is outside the pool 0..63"),
        (make_plan(step=2, admits=(make_row(2, [1, 1], [6], start=2),)), "2 of 2 ids cached"),
        (make_plan(step=2, admits=(make_row(2, [1] * 6, [6], start=5),)), "5 ids cached in 1 pages"),
        (make_plan(step=2, append_slots=i32(2), append_pages=i32(6)), "appends a page to slot 2"),
        (make_plan(step=2, append_slots=i32(0), append_pages=i32(6, 7)), "appends 2 pages to 1 slots"),
        (make_plan(step=2, append_slots=i32(0), append_pages=i32(-2)), "page -2 is outside"),
        (
            make_plan(step=2, append_slots=i32(0), append_pages=i32(6), append_groups=b"\1"),
            "cache group 1, which this model does not have",
        ),
        (make_plan(step=2, append_slots=i32(*[0] * 12), append_pages=i32(*range(12))), "more than 11 pages to slot 0"),
        (make_plan(step=2, decode_slots=i32(1)), "decodes slot 1, which has ids left to prefill"),
        (make_plan(step=2, decode_slots=i32(5)), "decodes slot 5, which holds no request"),
        (make_plan(step=2, decode_slots=i32(0, 0)), "decodes a slot twice"),
        (make_plan(step=2, decode_slots=i32(0), limits=i32(1, 1)), "sets 2 limits for 1 decode rows"),
        (make_plan(step=2, decode_slots=i32(0), limits=i32(2)), "sets limits of 2 to 2 ids; the most is 1"),
        (make_plan(step=2, decode_slots=i32(0), limits=i32(0)), "sets limits of 0 to 0 ids"),
        (make_plan(step=2, rewinds=i32(5, 1)), "rewinds slot 5, which holds no request"),
        (make_plan(step=2, rewinds=i32(0, 40)), "rewinds slot 0 to position 40; it is at"),
        (make_plan(step=2, chunks=i32(0, 1, 1)), "prefills slot 0, which holds no ids to prefill"),
        (make_plan(step=2, chunks=i32(1, 3, 1)), "prefills 3 ids of slot 1 from position 4; it has 6 ids"),
        (make_plan(step=2, chunks=i32(1, 0, 0)), "prefills 0 ids of slot 1"),
        (make_plan(step=2, chunks=i32(1, 1, 0, 1, 1, 1)), "prefills a slot twice"),
        (make_plan(step=2, chunks=i32(1, 1, 1)), "samples slot 1 at position 5 before the end of its 6 ids"),
    ],
)
def test_a_plan_that_contradicts_its_past_is_refused(plan: StepPlan, text: str) -> None:
    tables = make_tables()
    tables.apply(READY)
    with pytest.raises(PlanError, match=text):
        tables.apply(plan)


def test_decoding_beyond_the_pages_or_a_released_slot_is_refused() -> None:
    tables = make_tables()
    tables.apply(READY)
    for step in (2, 3):
        tables.apply(make_plan(step=step, decode_slots=i32(0)))
    with pytest.raises(PlanError, match="decodes slot 0 at position 4, which has no page"):
        tables.apply(make_plan(step=4))
    tables = make_tables()
    tables.apply(READY)
    tables.apply(make_plan(step=2, decode_slots=i32(0)))
    with pytest.raises(PlanError, match="goes on decoding slot 0, which was released"):
        tables.apply(make_plan(step=3, released=i32(0)))


def test_a_prompt_that_ends_unsampled_cannot_be_decoded() -> None:
    tables = make_tables()
    tables.apply(READY)
    tables.apply(make_plan(step=2, chunks=i32(1, 2, 0)))
    with pytest.raises(PlanError, match="never sampled"):
        tables.apply(make_plan(step=3, decode_slots=i32(1)))


def test_stop_ids_outside_the_vocabulary_are_not_masked() -> None:
    """K23: as an index, -1 would mean the last id."""
    tables = make_tables()
    stops = (-1, VOCAB, VOCAB + 10**6, 2**31 - 1, 7)
    batch = tables.apply(make_plan(admits=(make_row(0, [1], [1], min_len=3, stops=stops),), chunks=i32(0, 1, 1)))
    [(row, ids)] = tables.sampling_rows(batch).masked
    assert (row, ids.tolist()) == (0, [7])


def test_running_through_tells_a_wait_from_a_rest() -> None:
    tables = make_tables()
    assert not tables.running_through(READY)
    tables.apply(READY)
    assert tables.running_through(make_plan(step=2, released=i32(0)))
    assert not tables.running_through(make_plan(step=2, released=i32(0, 1)))


def test_a_limit_makes_a_row_of_several_tokens_and_a_rewind_takes_back_what_was_refused() -> None:
    """Two rows whose first results come late: one gains 2 of 3, the other all of 2."""
    tables = make_tables(max_step_ids=3)
    admits = (make_row(0, [1, 2, 3], [4, 5]), make_row(1, [4], [6]))
    tables.apply(make_plan(step=1, admits=admits, chunks=i32(0, 3, 1, 1, 1, 1)))
    batch = tables.apply(make_plan(step=2, decode_slots=i32(0, 1), limits=i32(3, 2)))
    assert batch.positions.tolist() == [3, 4, 5, 1, 2]
    assert batch.qo_indptr.tolist() == [0, 3, 5]
    assert batch.logit_tokens.tolist() == [0, 1, 2, 3, 4]
    assert batch.last_page_len.tolist() == [2, 3]
    assert batch.kv_slots.tolist() == [4 * 4 + 3, 5 * 4, 5 * 4 + 1, 6 * 4 + 1, 6 * 4 + 2]
    assert tables.sampling_rows(batch).positions.tolist() == [4, 5, 6, 2, 3]
    batch = tables.apply(make_plan(step=3, rewinds=i32(0, 5), admits=(), limits=i32(1, 1)))
    assert batch.positions.tolist() == [5, 3]
    assert tables.apply(make_plan(step=4, append_slots=i32(1), append_pages=i32(7))).positions.tolist() == [6, 4]


def test_a_row_needs_pages_for_all_that_its_limit_allows() -> None:
    tables = make_tables(max_step_ids=3)
    tables.apply(make_plan(step=1, admits=(make_row(0, [1, 2], [4]),), chunks=i32(0, 2, 1)))
    with pytest.raises(PlanError, match="decodes slot 0 at position 4, which has no page"):
        tables.apply(make_plan(step=2, decode_slots=i32(0), limits=i32(3)))
