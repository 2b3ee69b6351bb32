"""The results of steps: ids go to their rows, ends are found, and rows are passed on to the detokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from proto.messages import ID_BYTES, U8, Finish, RejectCode, RowStatus, StepResult, column
from scheduler.admission import Admission, Refusal
from scheduler.emit import BareRow, End, Outbound, StepRows
from scheduler.kv_cache import KvCache
from scheduler.lifecycle import Lifecycle
from scheduler.outputs import Index
from scheduler.pages import I32Array
from scheduler.request import Request
from scheduler.rows import Mask, Rows, RowView

T = TypeVar("T")


class WorkerError(RuntimeError):
    """The worker broke the step protocol, or refused a plan."""


@dataclass(slots=True)
class InFlight:
    """A planned step whose result is awaited."""

    step: int
    view: RowView  # rows that sample, in plan order
    limits: I32Array | None  # ids that each of the first rows may gain, the decode rows; None: exactly one each
    firsts: list[tuple[int, Request]]  # (row, request) of final chunks: their first id since placement
    bare: list[Request]  # prefill-only requests that this step completes
    prefill_tokens: int


class _Ended(msgspec.Struct):
    """A row that ends with the id at a position."""

    row: int
    request: Request
    position: int
    stop_id: int = -1  # -1: it ends by its length


@dataclass(slots=True)
class _Runs:
    """The ids that the rows of a view have gained."""

    first: I32Array  # position of each row's first
    counts: I32Array
    ids: I32Array
    ends: list[_Ended]

    def drop_empty(self, some: Mask) -> None:
        """Forget the rows that have gained nothing."""
        number = some.cumsum() - 1
        self.first, self.counts = self.first[some], self.counts[some]
        for end in self.ends:
            end.row = int(number[end.row])


class Results:
    """Applies results to the rows that still hold the slots they were planned for."""

    def __init__(self, rows: Rows, cache: KvCache, lifecycle: Lifecycle, admission: Admission, out: Outbound) -> None:
        self._rows = rows
        self._cache = cache
        self._lifecycle = lifecycle
        self._admission = admission
        self._out = out

    def apply(self, flight: InFlight, result: StepResult, now: int) -> None:
        """Take the result of the step. Raises WorkerError when it does not fit the plan."""
        counts = _counts(flight, result)
        view, keep = self._still_standing(flight, result)
        self._admission.speed.observe(flight.prefill_tokens, result.device_ns)
        generated = 0
        if view.count:
            if counts is None:
                generated = self._apply_ids(flight, view, keep, result, now)
            else:
                generated = self._apply_runs(flight, view, keep, counts, result, now)
        self._admission.thrash.observe_step(generated)
        self._lifecycle.counts.generated_tokens += generated
        if flight.bare:
            self._complete_bare(flight, now)

    def _still_standing(self, flight: InFlight, result: StepResult) -> tuple[RowView, Mask | None]:
        """Return the rows that still hold their slots, and which of the view they are (None = all)."""
        view, rows = flight.view, self._rows
        keep: Mask | None = None
        if view.departures != rows.departures:
            generations = rows.generation.take(view.index)
            # Bytes are compared faster than arrays, and most often nobody has left.
            if generations.tobytes() != view.generations.tobytes():
                keep = generations == view.generations
        if result.statuses:
            bad = column(result.statuses, U8) != RowStatus.OK
            failed = np.flatnonzero(bad if keep is None else bad & keep)
            keep = ~bad if keep is None else keep & ~bad
            for slot in view.slots[failed].tolist():
                self._fail(slot)
        if keep is None:
            return view, None
        self._lifecycle.counts.dropped_rows += view.count - int(np.count_nonzero(keep))
        return view.only(keep), keep

    def _fail(self, slot: int) -> None:
        """Fail a request whose logits are not finite; what it computed is not shared."""
        rows = self._rows
        request = rows.requests[slot]
        assert request is not None
        position = int(rows.outputs.known[slot]) - request.prompt_len
        self._lifecycle.counts.failed_rows += 1
        self._cache.distrust(request)
        message = f"the model's logits for output token {position} are not finite"
        self._lifecycle.refuse(request, Refusal(RejectCode.INTERNAL, "", message))

    def _apply_ids(self, flight: InFlight, view: RowView, keep: Mask | None, result: StepResult, now: int) -> int:
        """Apply the one id that each row of the view has gained; returns how many these are."""
        rows, ids = self._rows, column(result.ids)
        if keep is not None:
            ids = ids[keep]
        rows.identify(view)
        positions = rows.outputs.append_ids(view.index, view.version, ids)
        out = StepRows(flight.step, view, positions - view.prompt_lens, ids)
        if flight.firsts or result.logprobs:
            self._note_extras(out, flight, keep, result, now)
        full = positions + 1 >= view.max_lens
        maybe = (full | self._lifecycle.stops.watched.take(ids)).nonzero()[0]
        if maybe.size:
            self._finish_ended(
                out, self._find_ends(maybe, view.slots.take(maybe), ids.take(maybe), positions.take(maybe))
            )
        self._out.add_rows(out)
        return len(ids)

    def _apply_runs(
        self, flight: InFlight, view: RowView, keep: Mask | None, counts: I32Array, result: StepResult, now: int
    ) -> int:
        """Apply the run of ids, possibly empty, that each row of the view has gained; returns how many ids these are.

        A stop id ends its row, and the rest of the run is dropped.
        """
        rows, ids, limits = self._rows, column(result.ids), _padded(flight.limits, len(counts))
        if keep is not None:
            ids, counts, limits = ids[keep.repeat(counts)], counts[keep], limits[keep]
        first = rows.outputs.known.take(view.index)
        number = np.arange(view.count).repeat(counts)  # row of each id
        place = np.arange(len(ids)) - (counts.cumsum() - counts).repeat(counts)  # of each id in its row's run
        positions = first.take(number) + place
        full = positions + 1 >= rows.max_len.take(view.index.take(number))
        maybe = (full | self._lifecycle.stops.watched.take(ids)).nonzero()[0]
        number_of = number.take(maybe)
        ends = self._find_ends(number_of, view.slots.take(number_of), ids.take(maybe), positions.take(maybe))
        cut = counts.copy()
        for end in ends:
            cut[end.row] = end.position + 1 - first[end.row]
        ids = ids[place < cut.repeat(counts)]
        rows.append_runs(view, limits, cut, ids)
        self._emit_runs(flight, view, keep, _Runs(first, cut, ids, ends), result, now)
        return len(ids)

    def _emit_runs(
        self, flight: InFlight, view: RowView, keep: Mask | None, runs: _Runs, result: StepResult, now: int
    ) -> None:
        """Pass the rows that have gained something on to the detokenizers, and finish those that end."""
        some = runs.counts > 0
        if not some.all():
            runs.drop_empty(some)
            view = view.only(some)
            keep = some if keep is None else _refine(keep, some)
        if not view.count:
            return
        self._rows.identify(view)
        out = StepRows(flight.step, view, runs.first - view.prompt_lens, runs.ids, runs.counts)
        self._note_extras(out, flight, keep, result, now)
        self._finish_ended(out, runs.ends)
        self._out.add_rows(out)

    def _note_extras(self, out: StepRows, flight: InFlight, keep: Mask | None, result: StepResult, now: int) -> None:
        """Add openings and log-probabilities to the rows of a step."""
        for row, request in _kept(flight.firsts, keep):
            opening = self._lifecycle.first_opening(request, now)
            if opening is not None:
                out.openings.append((row, *opening))
        out.logprobs = _kept(result.logprobs, keep)

    def _find_ends(self, numbers: Index, slots: I32Array, ids: I32Array, positions: I32Array) -> list[_Ended]:
        """Return which rows end with which of these ids; of a row's ids only the first one that ends it counts."""
        rows, ends, ended = self._rows, [], -1
        columns = (numbers, slots, ids, positions)
        for row, slot, token, position in zip(*[values.tolist() for values in columns], strict=True):
            request = rows.requests[slot]
            assert request is not None
            if row == ended:
                continue
            if token in request.stops.ids and position >= request.min_len:
                ends.append(_Ended(row, request, position, token))
            elif position + 1 >= request.max_len:
                ends.append(_Ended(row, request, position))
            else:
                continue
            ended = row
        return ends

    def _finish_ended(self, out: StepRows, ends: list[_Ended]) -> None:
        """Finish the requests whose rows end in this step."""
        if not ends:
            return
        rows, finished = self._rows, self._admission.lengths.observe_finish
        for end in ends:
            request = end.request
            if end.stop_id >= 0:
                out.ends.append(End(end.row, Finish.STOP, end.stop_id, request.stops.ids[end.stop_id]))
                self._lifecycle.counts.wasted_rows += int(rows.planned[request.slot]) - end.position
            else:
                out.ends.append(End(end.row, Finish.LENGTH))
            finished(request.work_class, end.position + 1 - request.prompt_len)
        self._lifecycle.finish([end.request for end in ends])

    def _complete_bare(self, flight: InFlight, now: int) -> None:
        """Finish the prefill-only requests of this step that were not aborted."""
        done = [request for request in flight.bare if request.slot >= 0]
        for request in done:
            self._out.add_bare(
                flight.step, BareRow(request, End(0, Finish.LENGTH), self._lifecycle.first_opening(request, now))
            )
        if done:
            self._lifecycle.finish(done)


def _counts(flight: InFlight, result: StepResult) -> I32Array | None:
    """Ids of each row in the result; None: one each. Raises WorkerError when they do not fit the plan."""
    rows, ids = flight.view.count, len(result.ids) // ID_BYTES
    if flight.limits is None and not result.counts:
        if ids != rows:
            raise WorkerError(f"step {result.step} sampled {rows} rows; its result has {ids} ids")
        return None
    counts = column(result.counts) if result.counts else np.ones(rows, np.int32)
    if len(counts) != rows or int(counts.sum()) != ids:
        raise WorkerError(f"step {result.step} sampled {rows} rows; its result has {ids} ids in {len(counts)} rows")
    limits = _padded(flight.limits, rows)
    if ((counts > limits) | (counts < (limits == 1))).any():
        row = int(((counts > limits) | (counts < (limits == 1))).argmax())
        raise WorkerError(f"step {result.step}: row {row} has {counts[row]} ids; its limit is {limits[row]}")
    return counts


def _padded(limits: I32Array | None, rows: int) -> I32Array:
    """The limits of all rows: those behind the decode rows, and all where there are no limits, gain one id."""
    padded = np.ones(rows, np.int32)
    if limits is not None:
        padded[: len(limits)] = limits
    return padded


def _refine(keep: Mask, some: Mask) -> Mask:
    """Keep only some of what is kept."""
    refined = keep.copy()
    refined[keep] = some
    return refined


def _kept(numbered: Sequence[tuple[int, T]], keep: Mask | None) -> list[tuple[int, T]]:
    """Those of the numbered rows that are kept, numbered among the kept."""
    if keep is None or not numbered:
        return list(numbered)
    place = np.cumsum(keep) - 1
    return [(int(place[row]), what) for row, what in numbered if keep[row]]
