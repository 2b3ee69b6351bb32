"""The rows that hold slots: their pages, their order, and their way in and out.

Owner of the pool, the prefix tree and the row columns. Pages and slots that are given up here may be handed
out again at once: the plan that does so runs after every plan that used them
(docs/architecture.md, 'The step protocol').
"""

from array import array

import numpy as np

from proto.messages import AdmitRow, WorkerFacts, column
from scheduler.pages import PAGE_ID_BYTES, I32Array, PagePool, rank_among_equals
from scheduler.policy import cheapest_victim, expected_peak
from scheduler.prefix import PrefixTree
from scheduler.request import Request, State
from scheduler.rows import Rows, RowView
from scheduler.window import Window

# Whom a preemption hurts most: interactive work is given up last.
_VICTIM_WEIGHTS = np.array([4, 2, 1])  # by WorkClass


class Running:
    """All requests in slots. Decode rows keep their order for as long as they run."""

    def __init__(self, facts: WorkerFacts, capacity: int, prefix_caching: bool) -> None:
        self.window = Window(facts, capacity) if facts.window else None
        self.pool = self.window.full if self.window is not None else PagePool(facts.num_pages, facts.page_size)
        self.tree = PrefixTree(self.pool, prefix_caching)
        max_pages = self.pool.pages_of(facts.max_model_len)
        self.rows = Rows(capacity, max_pages, facts.page_size, facts.max_step_ids)
        self.speculation = facts.max_step_ids > 1  # whether rows may gain several ids in a step
        self.prefills: list[Request] = []  # with ids still to be planned, in order of admission
        self.committed = 0  # pages that all rows are expected to hold at their ends, shared ones counted often
        self._released: list[int] = []
        self._appended: list[tuple[I32Array, I32Array]] = []  # slots and pages of group 0
        self._order = np.zeros(0, np.int32)
        self._decoding = np.zeros(capacity, np.bool_)
        self._decoding_cells = self._decoding.data
        self._view: RowView | None = None  # the whole order, as long as it stands
        self._order_version = 0  # of the last view that was the whole order
        self._steps_left = 0  # decode steps until the first row of the order ends by length; 0 = to be counted

    @property
    def count(self) -> int:
        return self.rows.capacity - len(self.rows.free)

    @property
    def available(self) -> int:
        """Pages that rows can get, of the group that has fewer."""
        window = self.window
        return self.pool.available if window is None else min(self.pool.available, window.pool.available)

    @property
    def evictions(self) -> int:
        """Of pages that take memory, of group 0 where a model has it."""
        window = self.window
        return window.evictions if window is not None and window.imaginary else self.tree.evictions

    # ---------------------------------------------------------------- in and out

    def place(self, request: Request, budget: int) -> AdmitRow:
        """Give a request a slot, the pages of its matched path, own pages for the rest of its ids, and its first
        chunk of at most `budget` tokens. Layers behind a window get pages for that chunk only."""
        pool, tree, path, tokens, window = self.pool, self.tree, request.path, request.tokens, self.window
        hits = path.length
        # Held before the allocation, which may evict what is idle.
        pages = (tree.hold(path) if hits else b"") + tree.allocate(pool.pages_of(tokens) - hits)
        start = hits * pool.page_size
        request.state = State.PREFILL
        request.hit_pages = hits
        request.done = done = min(start + budget, tokens)
        slot = self.rows.enter(request, pages)
        window_pages = b""
        if window is None:
            tree.extend(path, request.ids, pages, done // pool.page_size)
        else:
            window_pages = window.enter(slot, path.pages, request.expected_pages)
            request.done = done = start + window.extend(slot, column(pages), start, done - start)
            self.rows.planned[slot] = done
            self._enter_tree(request)
            if window.imaginary:
                pages = b""
        self.committed += request.expected_pages
        if done < tokens:
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

    def leave(self, requests: list[Request], keep: bool) -> None:
        """Empty the slots of these requests; with `keep`, what they computed enters the prefix tree."""
        rows, tree, window = self.rows, self.tree, self.window
        slots = [request.slot for request in requests]
        if window is not None:
            window.leave(slots, [request.expected_pages for request in requests])
        for request, (table, ids, end) in zip(requests, rows.computed(slots), strict=True):
            tree.leave(request.path, table, ids, end if keep else 0)
            self.committed -= request.expected_pages
            if request.state is State.PREFILL and request.done < request.tokens:
                self.prefills.remove(request)
            self._decoding_cells[request.slot] = False
        self._forget_view()
        self._released += slots
        rows.leave(slots)

    def take_released(self) -> bytes:
        """Slots emptied since the last plan (int32)."""
        if not self._released:
            return b""
        released = array("i", self._released).tobytes()
        self._released.clear()
        return released

    # ---------------------------------------------------------------- prefill

    def advance(self, request: Request, tokens: int) -> int:
        """Plan the next ids of a prefill; returns how many: fewer when pages of layers behind windows are short."""
        slot = request.slot
        if self.window is not None:
            tokens = self.window.extend(slot, self.rows.pages[slot], request.done, tokens)
        request.done += tokens
        if request.done == request.tokens:
            self.prefills.remove(request)
        self.rows.planned[slot] = request.done
        self._enter_tree(request)
        return tokens

    def _enter_tree(self, request: Request) -> None:
        """Full pages enter the tree once they are planned: later rows, even of the same step, may hit them, since every
        layer writes its K/V before attention reads."""
        tree, path, ids, table = self.tree, request.path, request.ids, self.rows.table(request.slot)
        end = request.done // self.pool.page_size
        tree.extend(path, ids, table, end)
        if self.window is not None and path.severed:
            known, at = tree.known_below(path, ids, end), path.length * PAGE_ID_BYTES
            self.window.lend(table[at : at + len(known)], known)

    def slide_prefills(self) -> None:
        """Let go of what prefills have behind their windows. Once a plan, before any page is given out."""
        assert self.window is not None
        if self.prefills:
            self.window.slide(np.array([request.slot for request in self.prefills], np.int32), self.rows)

    def forget(self, request: Request) -> None:
        """What this row has computed is not to be trusted: nobody may hit it."""
        path = request.path
        if self.window is not None:
            below = self.tree.known_below(path, request.ids, request.tokens // self.pool.page_size)
            self.window.distrust(path.pages + below)
        self.tree.forget(path)

    def flush(self) -> int:
        """Evict all that nobody uses; returns how many pages, of memory, became free."""
        window = self.window
        if window is None:
            return self.tree.flush()
        pools = [window.pool] if window.imaginary else [self.pool, window.pool]
        before = sum(pool.free for pool in pools)
        self.tree.flush()
        window.flush()
        return sum(pool.free for pool in pools) - before

    def start_decoding(self, view: RowView, requests: list[Request]) -> RowView:
        """All known ids of these are planned: they sample in this step, behind the rows of `view`, and decode from
        the next one on, unless that id is their last. Returns all rows that sample."""
        slots = []
        for request in requests:
            slot = request.slot
            request.state = State.DECODE
            self._decoding_cells[slot] = request.done + 1 < request.max_len
            slots.append(slot)
        joining = np.array(slots, np.int32)
        joined = np.concatenate([view.slots, joining])
        # A step may have left out some of the order, or all.
        self._order = joined if view.version == self._order_version else np.concatenate([self._order, joining])
        self._forget_view()
        return self.rows.view(joined)

    # ---------------------------------------------------------------- decode

    def decodable_view(self) -> RowView:
        """Rows that can decode in the next step, in order; the view keeps its version as long as they are the same."""
        view = self._view
        if view is None:
            self._order = order = self._order.compress(self._decoding.take(self._order))
            if self.window is not None:  # rows that come from prefill hold what their last chunk saw
                self.window.slide(order, self.rows)
            self._view = view = self.rows.view(order)
            self._order_version = view.version
        return self._without_unsettled(view) if self.speculation else view

    def _without_unsettled(self, view: RowView) -> RowView:
        """Leave out the speculative rows that have steps in flight.

        Those without run together, as soon as none is in a step: in two groups by turns, each would wait for the
        other's steps.
        """
        speculative = self.rows.limits.take(view.index) > 1
        in_flight = self.rows.in_flight(view)
        ready = ~speculative
        if not (in_flight.compress(speculative) > 1).any():
            ready |= in_flight == 0  # a row that comes from its prefill has its first id in flight
        if ready.all():
            return view
        self._steps_left = 0
        return view.only(ready)

    def step_limits(self, view: RowView, most: int) -> I32Array | None:
        """Ids that each row may gain in the next step, `most` in all unless it is one each; None: exactly one each."""
        if not len(view):
            return None
        limits = np.minimum(self.rows.step_limits(view), max(most // len(view), 1))
        return limits if (limits > 1).any() else None

    def lacking_pages(self, view: RowView, limits: I32Array | None) -> I32Array:
        """Slots of rows that lack pages for what they compute in the next step, each as often as it lacks one. They let
        go of what they can first."""
        rows = self.rows
        lacking = rows.lacking_page(view) if limits is None else rows.lacking_pages(view, limits)
        if self.window is not None and lacking.size:
            self.window.slide(lacking if limits is None else np.unique(lacking), rows)
        return lacking

    def append_pages(self, slots: I32Array) -> None:
        """One more page for each of these rows, or several where one stands here several times."""
        pages = column(self.tree.allocate(len(slots)))
        ranks = rank_among_equals(slots) if self.speculation else None
        self.rows.append_pages(slots, pages, ranks)
        if self.window is not None:
            self.window.append_pages(slots, pages, ranks)
        if self.window is None or not self.window.imaginary:
            self._appended.append((slots, pages))

    def take_appended(self) -> tuple[bytes, bytes, bytes]:
        """Slots, pages and cache groups of the pages that rows got since the last plan, as they travel."""
        if self.window is not None:
            taken = self.window.appends(self._appended)
        elif self._appended:
            ((slots, pages),) = self._appended
            taken = slots.tobytes(), pages.tobytes(), b""
        else:
            return b"", b"", b""
        self._appended.clear()
        return taken

    def stall(self, view: RowView, needy: I32Array) -> tuple[RowView, I32Array]:
        """Leave out the rows that get no page in this step."""
        left_out = needy[self.available :]
        self._forget_view()
        return view.only(~np.isin(view.slots, left_out)), needy[: self.available]

    def decoded(self, view: RowView, limits: I32Array | None) -> None:
        """One decode step of these rows is planned. Rows whose last id it surely samples leave the order."""
        rows, index = self.rows, view.index
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
        rows, known = self.rows, self.rows.outputs.known
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
        held = self.rows.room[[request.slot for request in eligible]] // self.pool.page_size
        # Pages with further users survive a preemption.
        freed = held - np.array([request.path.length - request.path.own_pages for request in eligible])
        weights = _VICTIM_WEIGHTS[[request.work_class for request in eligible]]
        return eligible[cheapest_victim(freed, weights)]

    def peak_with(self, request: Request) -> int:
        """Most pages in use at once if this request is placed and all rows grow as expected."""
        present = [other for other in self.rows.requests if other is not None]
        slots = [other.slot for other in present]
        held = self.rows.room[slots].astype(np.int64) // self.pool.page_size
        expected = np.array([other.expected_pages for other in present], np.int64)
        own = held - np.array([other.hit_pages for other in present], np.int64)
        shared = max(self.pool.used - int(own.sum()), 0)
        needed = self.pool.pages_of(request.tokens)
        growth = np.append(np.maximum(expected - held, 1), max(request.expected_pages - needed, 1))
        peak = expected_peak(np.append(own, needed - request.path.length), growth)
        return shared + request.path.idle_pages + peak

    def window_peak_with(self, request: Request) -> int:
        """The same of the group behind windows. Rows grow no further than to a plateau; so two sums are bounds."""
        window = self.window
        assert window is not None
        present = [other for other in self.rows.requests if other is not None]
        slots = [other.slot for other in present]
        end = window.end[slots].astype(np.int64)
        expected = np.array([other.expected_pages for other in present], np.int64)
        own = end - np.maximum(window.first[slots], np.array([other.hit_pages for other in present], np.int64))
        _, idle = window.hit_pages(request.path.pages)
        shared = max(window.pool.used - int(own.sum()), 0)
        needed = self.pool.pages_of(request.tokens)
        own = np.append(own, window.least(needed - request.path.length))
        growth = np.append(np.maximum(expected - end, 1), max(request.expected_pages - needed, 1))
        plateaus = np.minimum(own + growth, window.plateau(self.rows.pages.shape[1]))
        return shared + idle + min(expected_peak(own, growth), int(plateaus.sum()))

    def owed(self) -> int:
        """Pages of the group behind windows that prefills must yet be able to get, whoever else gets some."""
        window, owed = self.window, 0
        assert window is not None
        for request in self.prefills:
            first, end = int(window.first[request.slot]), int(window.end[request.slot])
            owed += max(window.least(self.pool.pages_of(request.tokens) - first) - (end - first), 0)
        return owed
