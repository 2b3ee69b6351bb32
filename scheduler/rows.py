"""Columns over slots: whatever a step changes in every row, and nothing else."""

import itertools

import numpy as np
import numpy.typing as npt

from proto.messages import I32, ID_BYTES, U32, U64, column
from scheduler.outputs import Index, Outputs
from scheduler.pages import I32Array
from scheduler.request import Request

Mask = npt.NDArray[np.bool_]

_versions = itertools.count(1)


class RowView:
    """The rows of a step in plan order, and what shows later whether they still hold their slots.

    `version` is unique: two views with the same one have the same rows in the same order. What every result asks for
    is looked up once (`Rows.identify`) and kept, since the view of a steady batch lives long.
    """

    __slots__ = (
        "attempts",
        "count",
        "departures",
        "detokenizers",
        "generations",
        "identified",
        "index",
        "max_lens",
        "prompt_lens",
        "rids",
        "slots",
        "version",
    )

    rids: bytes  # as they travel
    attempts: bytes
    detokenizers: I32Array
    prompt_lens: I32Array
    max_lens: I32Array

    def __init__(self, slots: I32Array, index: Index, generations: I32Array, departures: int) -> None:
        self.count = slots.size
        self.slots = slots
        self.index = index  # the slots
        self.generations = generations
        self.departures = departures  # `Rows.departures` then: unchanged means that all rows still stand
        self.identified = False
        self.version = next(_versions)

    def only(self, mask: Mask) -> "RowView":
        part = RowView(self.slots[mask], self.index[mask], self.generations[mask], self.departures)
        if self.identified:
            part.identified = True
            part.rids = column(self.rids, U64)[mask].tobytes()
            part.attempts = column(self.attempts, U32)[mask].tobytes()
            part.detokenizers = self.detokenizers[mask]
            part.prompt_lens = self.prompt_lens[mask]
            part.max_lens = self.max_lens[mask]
        return part


class Rows:
    """The state of every slot, and the ids that rows have generated.

    `planned` counts ids whose K/V are in the cache once all planned steps have run; `outputs.known` those that results
    have brought. A decode step feeds the id at position `planned` and samples the next one.
    What grows by one in each step is kept in the order of the rows as long as they stay the same.

    A row whose `limits` is above one is *speculative*: a step may give it that many ids, or none. While such a step is
    in flight, `planned` counts them all.
    """

    def __init__(self, capacity: int, max_pages: int, page_size: int, max_step_ids: int) -> None:
        self.capacity = capacity
        self._max_step_ids = max_step_ids
        self.page_size = page_size
        self.generation = np.zeros(capacity, np.int32)
        self._rid = np.zeros(capacity, U64)
        self._attempt = np.zeros(capacity, U32)
        self._detokenizer = np.zeros(capacity, I32)
        self._prompt_len = np.zeros(capacity, I32)
        self.max_len = np.zeros(capacity, I32)
        self._planned = np.zeros(capacity, np.int32)
        self.room = np.zeros(capacity, np.int32)  # tokens that the row's pages hold
        self.limits = np.ones(capacity, np.int32)  # ids that a step may give the row at most
        self._rewound = np.zeros(capacity, np.bool_)  # gained fewer ids than the worker assumes
        self.outputs = Outputs(capacity, max_pages * page_size)
        self.pages = np.zeros((capacity, max_pages), I32)
        self._flat_pages = self.pages.reshape(-1)
        self._page_bytes = self.pages.data.cast("B")
        self._row_bytes = max_pages * ID_BYTES
        # A memoryview sets a cell three times as fast as its array does.
        self._cells = [
            column.data
            for column in (
                self._rid,
                self._attempt,
                self._detokenizer,
                self._prompt_len,
                self.max_len,
                self._planned,
                self.room,
            )
        ]
        self._generation_cells = self.generation.data
        self._room_cells = self.room.data
        self._planned_cells = self._planned.data
        self.requests: list[Request | None] = [None] * capacity
        self.departures = 0
        self.free = list(range(capacity - 1, -1, -1))  # slots, the next one last
        # The rows that decode step by step, and their planned counts in their order, which lag in `_planned`.
        self._steady: RowView | None = None
        self._steady_planned = self._planned[:0]

    def fill_slot(self, request: Request, pages: bytes) -> int:
        """Put a request into a slot with pages for all its known ids; the first pages are those of its matched path."""
        slot = self.free.pop()
        request.enter_slot(slot, request.path.length, self.page_size)
        rid, attempt, detokenizer, prompt_len, max_len, planned, room = self._cells
        rid[slot] = request.rid
        attempt[slot] = request.attempt
        detokenizer[slot] = request.detokenizer
        prompt_len[slot] = request.prompt_len
        max_len[slot] = request.max_len
        planned[slot] = request.done
        room[slot] = len(pages) // ID_BYTES * self.page_size
        if self._max_step_ids > 1:
            self.limits[slot] = self._max_step_ids
            self._rewound[slot] = False
        self.outputs.start_row(slot, request.tokens)
        at = slot * self._row_bytes
        self._page_bytes[at : at + len(pages)] = pages
        self.requests[slot] = request
        return slot

    def clear_slots(self, slots: list[int]) -> None:
        """Empty these slots. Results in flight for them no longer count."""
        self._settle()
        self.outputs.settle()
        self.departures += 1
        requests, generations = self.requests, self._generation_cells
        for slot in slots:
            request = requests[slot]
            assert request is not None
            request.leave_slot()
            requests[slot] = None
            generations[slot] += 1
            self.outputs.clear_row(slot, request.max_len - request.tokens)
        self.free += slots

    @property
    def count(self) -> int:
        """Number of rows that hold a slot."""
        return self.capacity - len(self.free)

    def table(self, slot: int) -> bytes:
        """Return a row's pages, from position 0 on."""
        at = slot * self._row_bytes
        return bytes(self._page_bytes[at : at + self._room_cells[slot] // self.page_size * ID_BYTES])

    def computed(self, slots: list[int]) -> list[tuple[bytes, bytes, int]]:
        """Return for each row its pages, its ids at least up to the last whole page of computed K/V, and the number of
        such pages.

        The newest id's K/V are not computed yet.
        """
        size, columns, known = self.page_size, [], self.outputs.known.data
        for slot in slots:
            request = self.requests[slot]
            assert request is not None
            end = (known[slot] - 1) // size
            ids = self.known_ids(slot) if end > request.tokens // size else request.ids
            columns.append((self.table(slot), ids, end))
        return columns

    def lacking_page(self, view: RowView) -> I32Array:
        """Return the slots of rows whose next id begins a page that they do not have yet."""
        if self._steady is None or view.version != self._steady.version:
            self._settle()
            self._steady = view
            self._steady_planned = self._planned.take(view.index)
        lacking: I32Array = view.slots.compress(self._steady_planned == self.room.take(view.index))
        return lacking

    def lacking_pages(self, view: RowView, limits: I32Array) -> I32Array:
        """Return the slots of rows that lack pages for their next `limits` ids, once for each page lacked."""
        beyond = self.planned.take(view.index) + limits - self.room.take(view.index)
        lacking: I32Array = view.slots.repeat(np.maximum(-(-beyond // self.page_size), 0))
        return lacking

    def append_pages(self, slots: I32Array, pages: I32Array, ranks: I32Array | None) -> None:
        """Give each of these rows one more page; `ranks` counts those before it for the same slot (None: 0 each)."""
        index = slots.astype(np.intp)
        room = self.room.take(index)
        if ranks is not None:
            room += ranks * self.page_size
        self._flat_pages[index * self.pages.shape[1] + room // self.page_size] = pages
        # Of equal slots the last one has the highest rank, and numpy assigns in order.
        self.room[index] = room + self.page_size

    def in_flight(self, view: RowView) -> I32Array:
        """Return how many ids each row may yet gain from steps in flight."""
        ahead: I32Array = self.planned.take(view.index) - self.outputs.known.take(view.index) + np.int32(1)
        return ahead

    def step_limits(self, view: RowView) -> I32Array:
        """Return how many ids each row may gain in the next step; speculative ones have nothing in flight."""
        left = self.max_len.take(view.index) - self.outputs.known.take(view.index)
        limits: I32Array = np.minimum(self.limits.take(view.index), left)
        return limits

    def plan_ids(self, view: RowView, limits: I32Array) -> I32Array:
        """Count up to `limits` more ids of each row as planned; returns the counts in the order of the rows."""
        planned: I32Array = self.planned.take(view.index) + limits
        self._planned[view.index] = planned
        return planned

    def append_runs(self, view: RowView, limits: I32Array, counts: I32Array, ids: I32Array) -> None:
        """Append `counts` ids to each row; its step could have given it `limits`."""
        self.outputs.append_runs(view.index, counts, ids)
        speculative = limits > 1
        index = view.index.compress(speculative)
        self.planned[index] = self.outputs.known.take(index) - 1
        self._rewound[index] = (counts < limits).compress(speculative)

    def drain_rewinds(self, view: RowView) -> bytes:
        """Return pairs (int32): slots that gained less than the worker assumes, and the position they compute next."""
        index = view.index.compress(self._rewound.take(view.index))
        self._rewound[index] = False
        return np.stack([index, self.planned.take(index)], axis=1).astype(I32).tobytes()

    def decoded(self, view: RowView) -> I32Array:
        """Count one more id of each row as planned; returns the counts in the order of the rows (read-only)."""
        if self._steady is not None and view.version == self._steady.version:
            self._steady_planned += 1
            return self._steady_planned
        self._settle()
        planned: I32Array = self._planned.take(view.index) + np.int32(1)
        self._planned[view.index] = planned
        return planned

    def set_planned(self, slot: int, planned: int) -> None:
        """Set the planned ids of a row that prefills."""
        self._planned_cells[slot] = planned

    @property
    def planned(self) -> I32Array:
        """Planned ids by slot (read-only)."""
        self._settle()
        return self._planned

    def _settle(self) -> None:
        """Write the planned counts that are kept in the order of the rows to their slots."""
        if self._steady is not None:
            self._planned[self._steady.index] = self._steady_planned
            self._steady = None

    def view(self, slots: I32Array) -> RowView:
        index = slots.astype(np.intp)
        return RowView(slots, index, self.generation.take(index), self.departures)

    def identify(self, view: RowView) -> None:
        """Look up which requests these rows belong to; all of them must still hold their slots."""
        if view.identified:
            return
        index = view.index
        view.rids = self._rid.take(index).tobytes()
        view.attempts = self._attempt.take(index).tobytes()
        view.detokenizers = self._detokenizer.take(index)
        view.prompt_lens = self._prompt_len.take(index)
        view.max_lens = self.max_len.take(index)
        view.identified = True

    def known_ids(self, slot: int) -> bytes:
        """Return all ids of a row: those it was queued with and those it has generated since."""
        request = self.requests[slot]
        assert request is not None
        return request.ids + self.outputs.generated(slot)
