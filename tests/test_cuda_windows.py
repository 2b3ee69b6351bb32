"""Pages behind a window on the emulated GPU: small pools, in which pages really are given away, change no token."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.cache import CacheGroups
from proto.channel import decode_as
from proto.config import WorkerOptions
from proto.messages import Finish, Sampling, StepPlan, TokenLogprobs, column
from tests.builders import GREEDY, behind_window, i32, make_plan, make_row, make_worker_options
from tests.cuda_cases import MODEL as HALF
from tests.cuda_cases import LatePair, assert_close, attention_of, changed_slots, play, silent
from tests.flashinfer_double import SimulationError, simulate
from tests.marks import mark_rest
from tests.pair import Pair, Story
from worker.cpu.start import start as start_cpu
from worker.cuda import tiles
from worker.cuda.device import CudaDevice
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.start import start
from worker.cuda.state import SlotPages
from worker.cuda.step import GpuStep
from worker.cuda.tiles import cut_chunks, list_stride, most_rows
from worker.steps.batch import I32Array
from worker.steps.page_table import PageTable
from worker.steps.prompts import step

PAGE = 4
LEAST = 4  # pages that a window of 10 and a new page take
MODELS = {
    "half": HALF,
    "all": msgspec.structs.replace(HALF, windows=(10, 10)),
    "two windows": msgspec.structs.replace(HALF, windows=(10, 0, 6), num_layers=3),
    "none": msgspec.structs.replace(HALF, windows=()),
}
WATCHED = Sampling(temperature=0.9, seed=7, logprobs=3)


def options_of(model: str, device: str, **changes: Any) -> WorkerOptions:
    values: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "page_size": PAGE,
        "num_pages": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "pipeline_depth": 3,
    }
    return make_worker_options(MODELS[model], device=device, **(values | changes))


def submit(pair: Pair) -> None:
    generator = np.random.default_rng(8)
    shared = generator.integers(0, HALF.vocab_size, 28).tolist()
    for nth, length in enumerate((40, 3, 33, 12, 50, 21)):
        own = generator.integers(0, HALF.vocab_size, length).tolist()
        prompt = [*shared[: length // 2], *own[length // 2 :]]
        pair.submit(prompt, min(14, 63 - length), sampling=GREEDY if nth % 3 == 2 else WATCHED)


def told(pair: Pair) -> list[tuple[list[int], Finish]]:
    return [(story.tokens, story.finish) for story in pair.stories.values()]


@cache
def expected(model: str) -> list[Story]:
    """By the CPU, with room for all."""
    options = options_of(model, "reference", num_pages=200)
    pair = Pair(start_cpu(options, silent), options, depth=1)
    submit(pair)
    pair.run()
    return list(pair.stories.values())


def compare(model: str, seed: int, settings: dict[str, Any], changes: dict[str, Any]) -> Counter[int]:
    """Assert that tokens and log-probabilities are the CPU's. Returns how often each page of group 1 was given."""
    stories, given_pages = expected(model), Counter[int]()
    with simulate(seed) as gpu:
        options = options_of(model, "cuda", **changes)
        pair = LatePair(gpu, start(options, silent), options, **settings)
        run = pair._run

        def watch(plan: StepPlan) -> None:
            groups, pages = np.frombuffer(plan.append_groups, np.uint8), column(plan.append_pages)
            given_pages.update(pages[groups == 1].tolist() if len(groups) else [])
            run(plan)

        pair._run = watch  # type: ignore[method-assign]
        submit(pair)
        pair.run()
        assert told(pair) == [(story.tokens, story.finish) for story in stories]
        pair.check_idle()
    for mine, theirs in zip(pair.stories.values(), stories, strict=True):
        for ours, wanted in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert_close(decode_as(ours, TokenLogprobs), decode_as(wanted, TokenLogprobs))
    return given_pages


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("half", {"depth": 2, "window_pages": 2 * LEAST}, {"enforce_eager": True}),
    ("half", {"depth": 3, "window_pages": 2 * LEAST, "prefix_caching": True}, {}),
    ("all", {"depth": 1, "window_pages": LEAST}, {}),
    ("all", {"depth": 3, "window_pages": 3 * LEAST, "prefix_caching": True}, {"deterministic": True}),
    ("two windows", {"depth": 2, "window_pages": 3 * LEAST, "prefix_caching": True, "debug_preempt_every": 5}, {}),
    ("two windows", {"depth": 3, "window_pages": 3 * LEAST, "prefix_caching": True}, {"deterministic": True}),
]


@pytest.mark.parametrize(("model", "settings", "changes"), mark_rest(pytest.mark.emulation, CASES), ids=str)
def test_tokens_are_the_cpus(
    model: str, settings: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "LONGEST_TILE", 8)  # or no list here would begin anywhere but at 0
    given_pages = compare(model, 1, settings, changes)
    assert max(given_pages) < settings["window_pages"]
    assert given_pages.total() > 2 * settings["window_pages"]  # they were given away, and again


# --------------------------------------------------------------------------- planted mistakes


def lists_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    holds = GpuStep.holds_indices
    patch.setattr(
        GpuStep, "holds_indices", lambda s, g, b, n: (g == 1 and s._indices_for[1][1] == n) or holds(s, g, b, n)
    )


def a_page_too_late(patch: pytest.MonkeyPatch) -> None:
    edit_starts(patch, PAGE)


def from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    edit_starts(patch, -64)


def edit_starts(patch: pytest.MonkeyPatch, more: int) -> None:
    page_ids = SlotPages.page_ids
    patch.setattr(SlotPages, "page_ids", lambda self, slots, starts, *rest: page_ids(self, slots, starts + more, *rest))


def counts_of_a_smaller_window(patch: pytest.MonkeyPatch) -> None:
    seen = PageTable._first_seen
    patch.setattr(PageTable, "_first_seen", lambda self, positions: seen(self, positions + (4 if self.window else 0)))


def hits_are_placed_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    edit_placed(patch, lambda table, places: places - places.min() % table._pages.shape[1] if table.window else places)


def appended_one_page_late(patch: pytest.MonkeyPatch) -> None:
    edit_placed(patch, lambda table, places: places + 1 if table.window and len(places) == 1 else places)


def edit_placed(patch: pytest.MonkeyPatch, edit: Callable[[PageTable, I32Array], I32Array]) -> None:
    placed = PageTable.placed

    def edited(self: PageTable) -> tuple[I32Array, I32Array]:
        places, pages = placed(self)
        return (edit(self, places) if len(places) else places), pages

    patch.setattr(PageTable, "placed", edited)


def layers_write_where_the_others_do(patch: pytest.MonkeyPatch) -> None:
    init = FlashInferAttention.__init__

    def edited(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.groups[1].kv_slots = self.groups[0].kv_slots

    patch.setattr(FlashInferAttention, "__init__", edited)


def padding_writes_to_a_live_page(patch: pytest.MonkeyPatch) -> None:
    init = SlotPages.__init__

    def edited(self: Any, slots: int, width: int, size: int, dummy: int, *args: Any, **kwargs: Any) -> None:
        init(self, slots, width, size, 1 if kwargs["window"] else dummy, *args, **kwargs)

    patch.setattr(SlotPages, "__init__", edited)


PLANTED = [
    lists_of_the_step_before,
    a_page_too_late,
    from_the_beginning,
    counts_of_a_smaller_window,
    hits_are_placed_from_the_beginning,
    appended_one_page_late,
    layers_write_where_the_others_do,
]


# Three rows: padded, in a bucket of four.
FOR_PLANTS: dict[str, Any] = {"depth": 3, "max_num_seqs": 3, "window_pages": 5 * LEAST, "prefix_caching": True}


@pytest.mark.emulation
def test_without_a_mistake_all_is_well() -> None:
    compare("two windows", 1, FOR_PLANTS, {})


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.emulation
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected("two windows")
    plant(monkeypatch)
    with pytest.raises((AssertionError, SimulationError, IndexError, RuntimeError)):
        compare("two windows", 1, FOR_PLANTS, {})


# --------------------------------------------------------------------------- a few plans


def make_device(model: str, **changes: Any) -> CudaDevice:
    device = start(options_of(model, "cuda", **changes), silent)
    device.reset(1)
    return device


def plans(model: str, rows: int, steps: int) -> list[StepPlan]:
    """So many prompts of 7 ids in one step, then decode steps of all; pages for 28 tokens each."""
    groups = CacheGroups.of(MODELS[model], PAGE, 4 * MODELS[model].num_layers, 64)
    admits = tuple(
        make_row(slot, [slot + n for n in range(1, 8)], [7 * slot + n for n in range(7)]) for slot in range(rows)
    )
    first = make_plan(admits=admits, chunks=i32(*(value for slot in range(rows) for value in (slot, 7, 1))))
    if groups.window:
        first = behind_window(first, groups.window, not groups.full_layers)
    later = [make_plan(step=number) for number in range(3, steps + 1)]
    return [first, make_plan(step=2, decode_slots=i32(*range(rows))), *later]


@pytest.mark.parametrize("model", ["half", "all"])
@pytest.mark.emulation
def test_padding_rows_of_a_graph_write_to_no_live_page(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(model)
    padding_writes_to_a_live_page(monkeypatch)
    with pytest.raises(AssertionError):
        check_padding(model)


def check_padding(model: str) -> None:
    with simulate(3) as gpu:
        device = make_device(model)
        script = plans(model, 3, 16)
        play(gpu, device, script[:2])
        groups = attention_of(device).groups
        assert list(groups) == ([0, 1] if model == "half" else [1])
        for plan in script[2:]:
            before = {n: [gpu.peek(x).clone() for x in (pages.keys, pages.values)] for n, pages in groups.items()}
            play(gpu, device, [plan])
            for number, pages in groups.items():
                assert pages.dummy_page == (device.facts.window_pages if number else device.facts.num_pages)
                written = gpu.peek(pages.kv_slots)[:3].tolist()
                for old, new in zip(before[number], (pages.keys, pages.values), strict=True):
                    assert changed_slots(old, gpu.peek(new)) <= {*written, pages.dummy_slot}


@pytest.mark.parametrize("model", ["none", "half", "all"])
@pytest.mark.emulation
def test_a_decode_step_lists_what_the_window_holds_and_launches_no_more(model: str) -> None:
    counts: list[tuple[int, int]] = []
    with simulate(3) as gpu, pytest.MonkeyPatch.context() as patch:
        place = GpuStep.place_indices

        def spy(self: GpuStep, group: int, *rest: Any) -> None:
            counts.append((group, rest[-1]))
            place(self, group, *rest)

        patch.setattr(GpuStep, "place_indices", spy)
        device = make_device(model)
        script = plans(model, 2, 21)
        play(gpu, device, script[:-1])
        with gpu.timeline.launch_path() as account:
            device.launch(script[-1])
        assert len(account.replays) == 2
        kinds = len(set(MODELS[model].windows) or {0})
        groups = len(device._step.state.groups)
        # To the device and back, and each plan's indptr, last_page_len and schedule.
        assert account.eager == ["copy host to device"] * (1 + 3 * kinds) + ["copy device to host"]
    most = {group: max(count for g, count in counts if g == group) for group, _ in counts}
    assert groups == len(most)
    assert most.get(1, 0) <= 2 * LEAST
    if 0 in most:
        assert most[0] == 2 * 7


@pytest.mark.emulation
def test_what_pages_behind_the_window_hold_is_nothing_to_a_row() -> None:
    """NaN: a kernel multiplies what it masks by 0, and with --deterministic lists begin before the window."""
    logits = []
    for poison in (False, True):
        with simulate(3) as gpu, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "LONGEST_TILE", 32)
            device = make_device("half", deterministic=True)
            script = plans("half", 2, 20)
            play(gpu, device, script[:-1])
            pages = attention_of(device).groups[1]
            if poison:  # position 25 sees positions 16 to 25: pages 4 to 6
                for kept in (pages.keys, pages.values):
                    for slot in range(2):
                        kept[:, 7 * slot : 7 * slot + 4].fill_(float("nan"))
                torch.cuda.synchronize()
            play(gpu, device, script[-1:])
            logits.append(gpu.peek(device._step.logits)[:2].clone())
    assert torch.equal(*logits)
    assert bool(torch.isfinite(logits[0]).all())


def test_facts_say_what_pages_there_are() -> None:
    with simulate(0):
        for model, wanted in {"none": (64, 0, 0), "half": (64, 10, 32), "all": (0, 10, 64)}.items():
            device = make_device(model, enforce_eager=True)
            assert (device.facts.num_pages, device.facts.window, device.facts.window_pages) == wanted
        whole = make_device("half", enforce_eager=True, max_model_len=10)  # which no sequence outgrows
        assert (whole.facts.num_pages, whole.facts.window, whole.facts.window_pages) == (64, 0, 0)


# --------------------------------------------------------------------------- --deterministic


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_where_the_list_of_a_token_begins_follows_from_its_position(data: st.DataObject) -> None:
    size, most, window = data.draw(st.sampled_from([4, 6])), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 50)), min_size=1, max_size=4))
    batch = step([np.arange(n, dtype=np.int32) for _, n in rows], size, [start for start, _ in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LONGEST_TILE", 8)
        stride = list_stride(size)
        assert stride * size in (8, 24)
        cut = cut_chunks(batch, most, size, window)
        assert len(cut.slots) <= most_rows(len(rows), len(batch.token_ids), most, size, window)
    assert cut.windowed is not None
    assert np.diff(cut.qo_indptr).max() <= most
    assert cut.qo_indptr[-1] == len(batch.token_ids)
    for row, slot in enumerate(cut.slots.tolist()):
        positions = batch.positions[cut.qo_indptr[row] : cut.qo_indptr[row + 1]]
        length = int(positions[-1]) + 1
        pages = cut.windowed.kv_indices[cut.windowed.kv_indptr[row] : cut.windowed.kv_indptr[row + 1]]
        all_pages = batch.kv_indices[batch.kv_indptr[slot] :][: -(-length // size)]
        for position in positions.tolist():
            first = max(position - window + 1, 0) // size // stride * stride
            assert pages.tolist() == all_pages[first:].tolist()
        full = cut.kv_indices[cut.kv_indptr[row] : cut.kv_indptr[row + 1]]
        assert full.tolist() == all_pages.tolist()
        assert (len(full) - 1) * size + cut.last_page_len[row] == length


def test_lists_made_by_the_host_and_the_device_begin_alike() -> None:
    """Of decode rows and chunks anywhere, with lists at multiples of three pages."""
    generator = np.random.default_rng(0)
    table = PageTable(slots=4, width=30, num_pages=99, page_size=PAGE, window=10, stride=3, lists_pages=False)
    with simulate(0) as gpu:
        slots = SlotPages(4, 30, PAGE, 99, 400, torch.device("cuda"), window=10, stride=3)
        numbers = torch.arange(30, dtype=torch.int32)
        slots.pages[:4].copy_(numbers.to("cuda"))  # page n is number n
        for _ in range(20):
            starts = generator.integers(0, 80, 4).astype(np.int32)
            counts = generator.integers(1, 30, 4).astype(np.int32)
            used = -(-(starts + counts) // PAGE)
            rows, nothing = np.arange(4, dtype=np.int32), np.zeros(0, np.int32)
            lists = table.lists(rows, starts, used.astype(np.int32), nothing, nothing, nothing)
            there, begin, indptr = (torch.from_numpy(a).to("cuda") for a in (rows, starts, lists.kv_indptr))
            found = gpu.peek(slots.page_ids(there, begin, indptr, int(lists.kv_indptr[-1]))).tolist()
            wanted: list[int] = []
            for start, end in zip(starts.tolist(), used.tolist(), strict=True):
                seen = max(start - 9, 0) // PAGE
                wanted += [99 if number < seen else number for number in range(seen // 3 * 3, end)]
            assert found == wanted
