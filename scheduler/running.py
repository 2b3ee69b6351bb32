"""The requests that hold slots: their way in and out, and the order in which they decode.

Slots that are given up here may be handed out again at once: the plan that does so runs after every plan that used
them (docs/architecture.md, 'The step protocol').
"""

from array import array

import numpy as np

from proto.messages import AdmitRow
from scheduler.kv_cache import KvCache
from scheduler.pages import I32Array
from scheduler.policy import cheapest_victim
from scheduler.request import Request, State
from scheduler.rows import Rows, RowView

# Whom a preemption hurts most: interactive work is given up last.
_VICTIM_WEIGHTS = np.array([4, 2, 1])  # by WorkClass


class Running:
    """All requests in slots. Decode rows keep their order for as long as they run.

    Its parts are the columns of `Rows` and the pages of `KvCache`, which others read; rows enter, grow and end here.
    """

    def __init__(self, rows: Rows, cache: KvCache, speculation: bool) -> None:
        self.prefills: list[Request] = []  # with ids still to be planned, in order of admission
        self.speculation = speculation  # whether rows may gain several ids in a step
        self._rows = rows
        self._cache = cache
        self._released: list[int] = []
        self._order = np.zeros(0, np.int32)
        self._decoding = np.zeros(rows.capacity, np.bool_)
        self._decoding_cells = self._decoding.data
        self._view: RowView | None = None  # the whole order, as long as it stands
        self._order_version = 0  # of the last view that was the whole order
        self._steps_left = 0  # decode steps until the first row of the order ends by length; 0 = to be counted

    # ---------------------------------------------------------------- in and out

    def place(self, request: Request, budget: int) -> AdmitRow:
        """Give a request a slot, the pages of its matched path, own pages for the rest of its ids, and its first
        chunk of at most `budget` tokens."""
        table = self._cache.allocate_prompt(request)
        slot = self._rows.fill_slot(request, table)
        start = request.done
        pages, window_pages = self._cache.start_row(request, table)
        self._cache.plan_chunk(request, min(budget, request.tokens - start), table)
        self._rows.set_planned(slot, request.done)
        if request.done < request.tokens:
            self.prefills.append(request)
        return AdmitRow(
            slot=slot,
            ids=request.ids,
            start=start,
            pages=pages,
            sampling=request.sampling,
            min_len=request.min_len,
            stop_ids=request.stop_ids,
            window_pages=window_pages,
        )

    def release_slots(self, requests: list[Request], keep: bool) -> None:
        """Empty the slots of these requests; with `keep`, what they computed enters the prefix tree."""
        slots = [request.slot for request in requests]
        self._cache.release_rows(requests, slots, keep)
        for request, slot in zip(requests, slots, strict=True):
            if request.state is State.PREFILL and request.done < request.tokens:
                self.prefills.remove(request)
            self._decoding_cells[slot] = False
        self._forget_view()
        self._released += slots
        self._rows.clear_slots(slots)

    def drain_released(self) -> bytes:
        """Slots emptied since the last plan (int32)."""
        if not self._released:
            return b""
        released = array("i", self._released).tobytes()
        self._released.clear()
        return released

    # ---------------------------------------------------------------- prefill

    def advance(self, request: Request, tokens: int) -> int:
        """Plan the next ids of a prefill; returns how many: fewer when pages of layers behind windows are short."""
        tokens = self._cache.plan_chunk(request, tokens, self._rows.table(request.slot))
        self._rows.set_planned(request.slot, request.done)
        if request.done == request.tokens:
            self.prefills.remove(request)
        return tokens

    def start_decoding(self, view: RowView, requests: list[Request]) -> RowView:
        """All known ids of these are planned: they sample in this step, behind the rows of `view`, and decode from
        the next one on, unless that id is their last. Returns all rows that sample."""
        slots = []
        for request in requests:
            slot = request.slot
            request.start_decoding()
            self._decoding_cells[slot] = request.done + 1 < request.max_len
            slots.append(slot)
        joining = np.array(slots, np.int32)
        joined = np.concatenate([view.slots, joining])
        # A step may have left out some of the order, or all.
        self._order = joined if view.version == self._order_version else np.concatenate([self._order, joining])
        self._forget_view()
        return self._rows.view(joined)

    # ---------------------------------------------------------------- decode

    def decodable_view(self) -> RowView:
        """Rows that can decode in the next step, in order; the view keeps its version as long as they are the same."""
        view = self._view
        if view is None:
            self._order = order = self._order.compress(self._decoding.take(self._order))
            self._cache.slide(order)  # rows that come from prefill hold what their last chunk saw
            self._view = view = self._rows.view(order)
            self._order_version = view.version
        return self._without_unsettled(view) if self.speculation else view

    def _without_unsettled(self, view: RowView) -> RowView:
        """Leave out the speculative rows that have steps in flight.

        Those without run together, as soon as none is in a step: in two groups by turns, each would wait for the
        other's steps.
        """
        speculative = self._rows.limits.take(view.index) > 1
        in_flight = self._rows.in_flight(view)
        ready = ~speculative
        if not (in_flight.compress(speculative) > 1).any():
            ready |= in_flight == 0  # a row that comes from its prefill has its first id in flight
        if ready.all():
            return view
        self._steps_left = 0
        return view.only(ready)

    def step_limits(self, view: RowView, most: int) -> I32Array | None:
        """Ids that each row may gain in the next step, `most` in all unless it is one each; None: exactly one each."""
        if not view.count:
            return None
        limits = np.minimum(self._rows.step_limits(view), max(most // view.count, 1))
        return limits if (limits > 1).any() else None

    def lacking_pages(self, view: RowView, limits: I32Array | None) -> I32Array:
        """Slots of rows that lack pages for what they compute in the next step, each as often as it lacks one. They let
        go of what they can first."""
        rows = self._rows
        lacking = rows.lacking_page(view) if limits is None else rows.lacking_pages(view, limits)
        if lacking.size:
            self._cache.slide(lacking if limits is None else np.unique(lacking))
        return lacking

    def stall(self, view: RowView, needy: I32Array) -> tuple[RowView, I32Array]:
        """Leave out the rows that get no page in this step."""
        left_out = needy[self._cache.available :]
        self._forget_view()
        return view.only(~np.isin(view.slots, left_out)), needy[: self._cache.available]

    def decoded(self, view: RowView, limits: I32Array | None) -> None:
        """One decode step of these rows is planned. Rows whose last id it surely samples leave the order."""
        rows, index = self._rows, view.index
        planned = rows.decoded(view) if limits is None else rows.plan_ids(view, limits)
        if limits is not None:
            self._steps_left = 0
        elif self._steps_left > 1:
            self._steps_left -= 1
            return
        left = rows.max_len.take(index) - planned
        if limits is not None:
            index, left = index.compress(limits == 1), left.compress(limits == 1)
        ending = index.compress(left <= 1)
        if ending.size:
            self._decoding[ending] = False
            self._forget_view()
        elif limits is None and view.version == self._order_version:
            self._steps_left = int(left.min()) - 1

    def _forget_view(self) -> None:
        """The order changes, or a step leaves some of it out."""
        self._view = None
        self._steps_left = 0

    # ---------------------------------------------------------------- pressure

    def preemptible(self) -> list[Request]:
        """Decode rows with at least one id since they were placed, so that a preemption never undoes everything."""
        rows, known = self._rows, self._rows.outputs.known
        return [
            request
            for request in rows.requests
            if request is not None and request.state is State.DECODE and known[request.slot] > request.tokens
        ]

    def victim(self) -> Request | None:
        """Whom to preempt: see `cheapest_victim`."""
        eligible = self.preemptible()
        if not eligible:
            return None
        held = self._rows.room[[request.slot for request in eligible]] // self._rows.page_size
        # Pages with further users survive a preemption.
        freed = held - np.array([request.path.length - request.path.own_pages for request in eligible])
        weights = _VICTIM_WEIGHTS[[request.work_class for request in eligible]]
        return eligible[cheapest_victim(freed, weights)]
