"""Planted bugs in the metadata: each must make the comparison with the reference fail, or the double protest.

A bug that the tests let pass on a CPU would be wrong logits on a GPU, at times, without a word.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.flashinfer_cases import DOUBLE, GpuRunner, ReferenceRunner, Traffic, compare, config
from tests.flashinfer_double import SimulationError
from worker.cuda import flashinfer as backend
from worker.cuda.attention import pad_indptr
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.pinned import PinnedRing, PinnedTurn
from worker.layers.attention import AttentionShape
from worker.steps.batch import StepBatch

STEPS = 30
Patch = pytest.MonkeyPatch
PLANTED: dict[str, Callable[[Patch], None]] = {}


def planted(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PLANTED[function.__name__] = function
    return function


def play() -> None:
    """Soft-caps, one windowed and one full layer, decode rows behind graphs: Gemma 2 and all its needs."""
    with DOUBLE(seed=3):
        reference = ReferenceRunner(config("gemma2"), DOUBLE.dtype)
        compare(reference, GpuRunner(reference), Traffic(np.random.default_rng(5)), STEPS, DOUBLE.tolerance)


def edit_batch(patch: Patch, **changes: Callable[[StepBatch], Any]) -> None:
    """Let every plan see a batch with some columns changed."""
    for name in ("plan", "plan_graph"):
        original = getattr(FlashInferAttention, name)

        def edited(self: Any, batch: Any, *args: Any, original: Any = original, **kwargs: Any) -> None:
            if batch is not None:
                batch = replace(batch, **{field: change(batch) for field, change in changes.items()})
            original(self, batch, *args, **kwargs)

        patch.setattr(FlashInferAttention, name, edited)


def edit_options(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    original = FlashInferAttention._options

    def edited(self: Any, wrappers: Any) -> dict[str, Any]:
        options = original(self, wrappers)
        change(options)
        return options

    patch.setattr(FlashInferAttention, "_options", edited)


def edit_plan_decode(patch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    original = FlashInferAttention._plan_decode

    def edited(self: Any, wrappers: Any, wrapper: Any, indptr: Any, last: Any, indices: Any) -> None:
        original(self, wrappers, wrapper, *change(indptr, last, indices))

    patch.setattr(FlashInferAttention, "_plan_decode", edited)


# --------------------------------------------------------------------------- the bugs


@planted
def last_page_len_is_modulo(patch: Patch) -> None:
    """n % page_size for (n - 1) % page_size + 1: wrong at full pages only."""
    edit_batch(patch, last_page_len=lambda b: b.last_page_len % 16)


@planted
def last_page_len_is_one_short(patch: Patch) -> None:
    edit_batch(patch, last_page_len=lambda b: np.maximum(b.last_page_len - 1, 1))


@planted
def window_counts_the_token_itself(patch: Patch) -> None:
    edit_options(patch, lambda o: o.update(window_left=o["window_left"] + 1 if o["window_left"] >= 0 else -1))


@planted
def windows_are_forgotten(patch: Patch) -> None:
    edit_options(patch, lambda o: o.update(window_left=-1))


@planted
def soft_cap_is_forgotten(patch: Patch) -> None:
    edit_options(patch, lambda o: o.update(logits_soft_cap=0.0))


@planted
def scale_is_forgotten(patch: Patch) -> None:
    edit_options(patch, lambda o: o.update(sm_scale=None))


@planted
def prefill_is_not_causal(patch: Patch) -> None:
    original = FlashInferAttention._plan_prefill

    def edited(self: Any, wrappers: Any, *metadata: torch.Tensor) -> None:
        wrapper = wrappers.eager
        plan = wrapper.plan
        wrapper.plan = lambda *a, **k: plan(*a, **(k | {"causal": False}))
        original(self, wrappers, *metadata)
        del wrapper.plan

    patch.setattr(FlashInferAttention, "_plan_prefill", edited)


@planted
def padding_reads_and_writes_a_live_page(patch: Patch) -> None:
    original = FlashInferAttention.__init__

    def edited(self: Any, shape: AttentionShape, *args: Any, **kwargs: Any) -> None:
        original(self, shape, *args, **kwargs)
        for pages in self.groups.values():
            pages.dummy_page, pages.dummy_slot = 5, 5 * shape.page_size

    patch.setattr(FlashInferAttention, "__init__", edited)


@planted
def padding_writes_no_slot_of_its_own(patch: Patch) -> None:
    """What the last step left in the buffer of slots is written again, by rows that mean nothing."""
    original = FlashInferAttention._upload

    def edited(self: Any, turn: PinnedTurn, batch: StepBatch | None, bucket: int) -> None:
        pages = batch is not None and bucket > len(batch.slots)
        original(self, turn, batch, bucket if not pages else len(batch.slots))  # type: ignore[union-attr]

    patch.setattr(FlashInferAttention, "_upload", edited)


@planted
def windows_share_an_int_workspace(patch: Patch) -> None:
    original = FlashInferAttention._make_wrappers
    shared: list[Any] = []

    def edited(self: Any, window: int, eager: Any) -> Any:
        wrappers = original(self, window, eager)
        shared.append(wrappers.workspace)
        wrappers.workspace = eager._int_workspace_buffer = shared[0]
        return wrappers

    patch.setattr(FlashInferAttention, "_make_wrappers", edited)


@planted
def pinned_buffer_is_refilled_in_flight(patch: Patch) -> None:
    def begin(self: PinnedRing) -> PinnedTurn:
        turn = self._turns[self.index]
        turn.clear()
        return turn

    patch.setattr(PinnedRing, "begin", begin)


@planted
def schedules_share_a_pinned_buffer(patch: Patch) -> None:
    original = backend._Wrappers.__init__

    def edited(self: Any, *args: Any) -> None:
        original(self, *args)
        self.pinned = self.pinned[:1] * len(self.pinned)

    patch.setattr(backend._Wrappers, "__init__", edited)


@planted
def replay_without_a_plan(patch: Patch) -> None:
    """plan() before the capture only."""
    original = FlashInferAttention._plan_decode
    planned: set[int] = set()

    def edited(self: Any, wrappers: Any, wrapper: Any, *metadata: torch.Tensor) -> None:
        if wrapper is wrappers.eager or id(wrapper) not in planned:
            original(self, wrappers, wrapper, *metadata)
        planned.add(id(wrapper))

    patch.setattr(FlashInferAttention, "_plan_decode", edited)


@planted
def buffers_move_on_under_a_stale_plan(patch: Patch) -> None:
    """The metadata is copied for each replay; the schedule is that of the capture."""
    original = FlashInferAttention._plan_decode
    planned: set[int] = set()

    def edited(self: Any, wrappers: Any, wrapper: Any, indptr: Any, last: Any, indices: Any) -> None:
        if wrapper is wrappers.eager or id(wrapper) not in planned:
            original(self, wrappers, wrapper, indptr, last, indices)
        else:
            self.groups[0].kv_indptr[: len(indptr)].copy_(indptr, non_blocking=True)
            self._last_page_len[: len(last)].copy_(last, non_blocking=True)
        planned.add(id(wrapper))

    patch.setattr(FlashInferAttention, "_plan_decode", edited)


@planted
def another_bucket_is_planned(patch: Patch) -> None:
    original = FlashInferAttention.plan_graph

    def edited(self: Any, batch: StepBatch | None, bucket: int, **kwargs: Any) -> None:
        larger = bucket if batch is None or bucket == 8 else 2 * bucket
        original(self, batch, larger, **kwargs)

    patch.setattr(FlashInferAttention, "plan_graph", edited)


@planted
def buffers_of_a_bucket_are_made_anew(patch: Patch) -> None:
    original = FlashInferAttention._plan_decode

    def edited(self: Any, wrappers: Any, wrapper: Any, *metadata: torch.Tensor) -> None:
        if wrapper is not wrappers.eager:
            wrapper._last = wrapper._last.clone()
        original(self, wrappers, wrapper, *metadata)

    patch.setattr(FlashInferAttention, "_plan_decode", edited)


@planted
def indptr_is_64_bit(patch: Patch) -> None:
    edit_plan_decode(patch, lambda indptr, last, indices: (indptr.long(), last, indices))


@planted
def indptr_decreases_at_padding(patch: Patch) -> None:
    original = pad_indptr

    def edited(lists: Any, bucket: int) -> Any:
        rows = 0 if lists is None else len(lists.kv_indptr) - 1
        return np.where(np.arange(bucket + 1) > rows, 0, original(lists, bucket)).astype(np.int32)

    patch.setattr("worker.cuda.flashinfer.pad_indptr", edited)


@planted
def pages_are_in_reverse(patch: Patch) -> None:
    """Within each row."""

    def reverse(batch: StepBatch) -> Any:
        rows = zip(batch.kv_indptr[:-1], batch.kv_indptr[1:], strict=True)
        return np.concatenate([batch.kv_indices[a:b][::-1] for a, b in rows])

    edit_batch(patch, kv_indices=reverse)


@planted
def pages_of_two_rows_are_exchanged(patch: Patch) -> None:
    edit_plan_decode(patch, lambda indptr, last, indices: (indptr, last, indices.flip(0)))


@planted
def chunks_begin_at_the_decode_rows_pages(patch: Patch) -> None:
    original = FlashInferAttention._plan_prefill

    def edited(self: Any, wrappers: Any, qo: Any, indptr: Any, last: Any, indices: torch.Tensor) -> None:
        original(self, wrappers, qo, indptr, last, self.groups[0].kv_indices[: len(indices)])

    patch.setattr(FlashInferAttention, "_plan_prefill", edited)


@planted
def slots_are_one_off(patch: Patch) -> None:
    edit_batch(patch, kv_slots=lambda b: np.where(b.kv_slots % 16 == 15, b.kv_slots, b.kv_slots + 1))


@planted
def keys_are_written_after_attention(patch: Patch) -> None:
    original = FlashInferAttention.run

    def edited(self: Any, layer: int, *qkv: Any) -> torch.Tensor:
        pages, parts = self.groups[0], self._parts
        slots = pages.kv_slots
        again: list[Any] = [x.clone() if isinstance(x, torch.Tensor) else x for x in qkv]
        pages.kv_slots = torch.full_like(slots, pages.dummy_slot)
        out = original(self, layer, *qkv)
        pages.kv_slots, self._parts = slots, ()
        original(self, layer, *again)
        self._parts = parts
        return out

    patch.setattr(FlashInferAttention, "run", edited)


# --------------------------------------------------------------------------- the tests


def test_without_a_bug_all_is_well() -> None:
    play()


@pytest.mark.emulation
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises((AssertionError, SimulationError)) as found:
        play()
    assert isinstance(found.value, SimulationError) or "logits differ" in str(found.value)


def test_tensor_cores_are_asked_for_where_cuda_cores_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferAttention, "_wants_tensor_cores", lambda self: False)
    with DOUBLE(seed=1):
        reference = ReferenceRunner(config("qwen2"), DOUBLE.dtype)
        gpu = GpuRunner(reference)
        with pytest.raises(SimulationError, match="a group of 7 needs tensor cores"):
            compare(reference, gpu, Traffic(np.random.default_rng(5)), STEPS, DOUBLE.tolerance)
