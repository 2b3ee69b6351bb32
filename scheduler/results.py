"""What a step gave: ids into rows, ends found, and rows noted for the detokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from proto.messages import U8, Finish, RejectCode, RowStatus, StepResult, column
from scheduler.admission import Admission, Refusal
from scheduler.emit import BareRow, End, Outbound, StepRows
from scheduler.lifecycle import Lifecycle
from scheduler.pages import I32Array
from scheduler.request import Request
from scheduler.rows import Mask, RowView
from scheduler.running import Running

T = TypeVar("T")


class WorkerError(RuntimeError):
    """The worker broke the step protocol, or refused a plan."""


@dataclass(slots=True)
class InFlight:
    """A planned step whose result is awaited."""

    step: int
    view: RowView  # rows that sample, in plan order
    firsts: list[tuple[int, Request]]  # (row, request) of final chunks: their first id since placement
    bare: list[Request]  # prefill-only requests that this step completes
    prefill_tokens: int


class Results:
    """Applies results to the rows that still hold the slots they were planned for."""

    def __init__(self, running: Running, lifecycle: Lifecycle, admission: Admission, out: Outbound) -> None:
        self._running = running
        self._lifecycle = lifecycle
        self._admission = admission
        self._out = out

    def apply(self, flight: InFlight, result: StepResult, now: int) -> None:
        """Take the result of the step. Raises WorkerError when it does not fit the plan."""
        ids = column(result.ids)
        if len(ids) != len(flight.view):
            raise WorkerError(f"step {result.step} sampled {len(flight.view)} rows; its result has {len(ids)} ids")
        view, keep = self._still_standing(flight, result)
        if keep is not None:
            ids = ids[keep]
        self._admission.speed.measured(flight.prefill_tokens, result.device_ns)
        self._admission.thrash.step(len(view))
        self._lifecycle.counts.generated_tokens += len(view)
        if len(view):
            self._take_ids(flight, view, ids, keep, result, now)
        if flight.bare:
            self._complete_bare(flight, now)

    def _still_standing(self, flight: InFlight, result: StepResult) -> tuple[RowView, Mask | None]:
        """The rows whose result counts, and which those are; None = all."""
        view, rows = flight.view, self._running.rows
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
        self._lifecycle.counts.dropped_rows += len(view) - int(np.count_nonzero(keep))
        return view.only(keep), keep

    def _fail(self, slot: int) -> None:
        """This row's logits are not numbers: the request ends alone, and its pages are not to be shared."""
        rows = self._running.rows
        request = rows.requests[slot]
        assert request is not None
        position = int(rows.outputs.known[slot]) - request.prompt_len
        self._lifecycle.counts.failed_rows += 1
        self._running.forget(request)
        message = f"the model's logits for output token {position} are not finite"
        self._lifecycle.refuse(request, Refusal(RejectCode.INTERNAL, "", message))

    def _take_ids(
        self, flight: InFlight, view: RowView, ids: I32Array, keep: Mask | None, result: StepResult, now: int
    ) -> None:
        rows = self._running.rows
        rows.identify(view)
        positions = rows.outputs.append_ids(view.index, view.version, ids)
        out = StepRows(flight.step, view, positions - view.prompt_lens, ids)
        for row, request in _kept(flight.firsts, keep):
            opening = self._lifecycle.open(request, now)
            if opening is not None:
                out.openings.append((row, *opening))
        out.logprobs = _kept(result.logprobs, keep)
        self._find_ends(out, positions)
        self._out.rows(out)

    def _find_ends(self, out: StepRows, positions: I32Array) -> None:
        """Let go of the rows that end with this id."""
        view, ids = out.view, out.ids
        full = positions + 1 >= view.max_lens
        maybe = (full | self._lifecycle.stops.watched.take(ids)).nonzero()[0]
        if not maybe.size:
            return
        rows, finished = self._running.rows, self._admission.lengths.finished
        done: list[Request] = []
        columns = (maybe, view.slots.take(maybe), ids.take(maybe), positions.take(maybe))
        for row, slot, token, position in zip(*[values.tolist() for values in columns], strict=True):
            request = rows.requests[slot]
            assert request is not None
            if token in request.stops.ids and position >= request.min_len:
                out.ends.append(End(row, Finish.STOP, token, request.stops.ids[token]))
                self._lifecycle.counts.wasted_rows += int(rows.planned[slot]) - position
            elif position + 1 >= request.max_len:
                out.ends.append(End(row, Finish.LENGTH))
            else:
                continue
            finished(request.work_class, position + 1 - request.prompt_len)
            done.append(request)
        if done:
            self._lifecycle.finish(done)

    def _complete_bare(self, flight: InFlight, now: int) -> None:
        """Prefill-only requests of this step are done, unless they were aborted."""
        done = [request for request in flight.bare if request.slot >= 0]
        for request in done:
            self._out.bare(flight.step, BareRow(request, End(0, Finish.LENGTH), self._lifecycle.open(request, now)))
        if done:
            self._lifecycle.finish(done)


def _kept(numbered: Sequence[tuple[int, T]], keep: Mask | None) -> list[tuple[int, T]]:
    """Those of the numbered rows that are kept, numbered among the kept."""
    if keep is None or not numbered:
        return list(numbered)
    place = np.cumsum(keep) - 1
    return [(int(place[row]), what) for row, what in numbered if keep[row]]
