"""Columns over slots: all that a step changes of every row, and nothing that it does not."""

import mmap

import numpy as np
import numpy.typing as npt

from proto.messages import I32, U32, U64, column
from scheduler.pages import PAGE_ID_BYTES, I32Array
from scheduler.request import ID_BYTES, Request

Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]  # numpy gathers several times faster with its own index type

_KEPT_OUTPUT = 1 << 16  # bytes of a slot's ids that stay resident between its requests


class RowView:
    """Rows of a step, in plan order, and what tells later whether they still hold their slots.

    What every result asks for is looked up once (`Rows.identify`) and kept: the view of a steady batch lives long.
    """

    __slots__ = (
        "attempts",
        "departures",
        "detokenizers",
        "generations",
        "identified",
        "index",
        "max_lens",
        "origins",
        "prompt_lens",
        "rids",
        "slots",
    )

    rids: bytes  # as they travel
    attempts: bytes
    detokenizers: I32Array
    prompt_lens: I32Array
    max_lens: I32Array
    origins: Index

    def __init__(self, slots: I32Array, index: Index, generations: I32Array, departures: int) -> None:
        self.slots = slots
        self.index = index  # the slots
        self.generations = generations
        self.departures = departures  # `Rows.departures` then: unchanged means that all rows still stand
        self.identified = False

    def __len__(self) -> int:
        return self.slots.size

    def only(self, mask: Mask) -> "RowView":
        part = RowView(self.slots[mask], self.index[mask], self.generations[mask], self.departures)
        if self.identified:
            part.identified = True
            part.rids = column(self.rids, U64)[mask].tobytes()
            part.attempts = column(self.attempts, U32)[mask].tobytes()
            part.detokenizers = self.detokenizers[mask]
            part.prompt_lens = self.prompt_lens[mask]
            part.max_lens = self.max_lens[mask]
            part.origins = self.origins[mask]
        return part


class Rows:
    """State of every slot, and the ids that rows generated.

    `known` counts ids that results have brought; `planned` counts ids whose K/V are in the cache once all
    planned steps have run. A decode step feeds the id at position `planned` and samples the next one.
    Ids that a row generated since it was placed stand in one array for all, with room for the longest; the system
    gives it memory where it is written.
    """

    def __init__(self, capacity: int, max_pages: int, page_size: int) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.generation = np.zeros(capacity, np.int32)
        self._rid = np.zeros(capacity, U64)
        self._attempt = np.zeros(capacity, U32)
        self._detokenizer = np.zeros(capacity, I32)
        self._prompt_len = np.zeros(capacity, I32)
        self.max_len = np.zeros(capacity, I32)
        self.known = np.zeros(capacity, np.int32)
        self.planned = np.zeros(capacity, np.int32)
        self.room = np.zeros(capacity, np.int32)  # tokens that the row's pages hold
        self._origin = np.zeros(capacity, np.intp)  # where the output would begin, did it begin at position 0
        self.pages = np.zeros((capacity, max_pages), I32)
        self._flat_pages = self.pages.reshape(-1)
        self._page_bytes = self.pages.data.cast("B")
        self._row_bytes = max_pages * PAGE_ID_BYTES
        # A memoryview sets a cell three times as fast as its array does.
        self._cells = [
            column.data
            for column in (
                self._rid,
                self._attempt,
                self._detokenizer,
                self._prompt_len,
                self.max_len,
                self.known,
                self.planned,
                self.room,
                self._origin,
            )
        ]
        self._generation_cells = self.generation.data
        self._known_cells = self.known.data
        self._room_cells = self.room.data
        self.requests: list[Request | None] = [None] * capacity
        self.departures = 0
        self._output_bytes = -(-max_pages * page_size * ID_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE  # of a slot
        self._outputs = mmap.mmap(-1, capacity * self._output_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._output_ids = np.frombuffer(self._outputs, np.int32)
        self.free = list(range(capacity - 1, -1, -1))  # slots, the next one last

    def enter(self, request: Request, pages: bytes) -> int:
        """Put a request into a slot with pages for all its known ids."""
        slot = self.free.pop()
        tokens = request.tokens
        rid, attempt, detokenizer, prompt_len, max_len, known, planned, room, origin = self._cells
        rid[slot] = request.rid
        attempt[slot] = request.attempt
        detokenizer[slot] = request.detokenizer
        prompt_len[slot] = request.prompt_len
        max_len[slot] = request.max_len
        known[slot] = tokens
        planned[slot] = request.done
        room[slot] = len(pages) // PAGE_ID_BYTES * self.page_size
        origin[slot] = slot * self._output_bytes // ID_BYTES - tokens
        at = slot * self._row_bytes
        self._page_bytes[at : at + len(pages)] = pages
        self.requests[slot] = request
        request.slot = slot
        return slot

    def leave(self, slots: list[int]) -> None:
        """Empty these slots. Results on their way no longer count."""
        self.departures += 1
        requests, generations = self.requests, self._generation_cells
        for slot in slots:
            request = requests[slot]
            assert request is not None
            request.slot = -1
            requests[slot] = None
            generations[slot] += 1
            if (request.max_len - request.tokens) * ID_BYTES > _KEPT_OUTPUT:
                self._outputs.madvise(mmap.MADV_DONTNEED, slot * self._output_bytes, self._output_bytes)
        self.free += slots

    def table(self, slot: int) -> bytes:
        """A row's pages, from position 0 on."""
        at = slot * self._row_bytes
        return bytes(self._page_bytes[at : at + self._room_cells[slot] // self.page_size * PAGE_ID_BYTES])

    def computed(self, slots: list[int]) -> list[tuple[bytes, bytes, int]]:
        """Of each row its pages, its ids as far as whole pages of K/V are computed at least, and how many these are.

        The newest id's K/V are not computed yet.
        """
        size, columns = self.page_size, []
        for slot in slots:
            request, known = self.requests[slot], self._known_cells[slot]
            assert request is not None
            end = (known - 1) // size
            ids = self.known_ids(slot) if end > request.tokens // size else request.ids
            columns.append((self.table(slot), ids, end))
        return columns

    def append(self, slots: I32Array, pages: I32Array) -> None:
        """One more page for each of these rows."""
        index = slots.astype(np.intp)
        room = self.room.take(index)
        self._flat_pages[index * self.pages.shape[1] + room // self.page_size] = pages
        self.room[index] = room + self.page_size

    def view(self, slots: I32Array) -> RowView:
        index = slots.astype(np.intp)
        return RowView(slots, index, self.generation.take(index), self.departures)

    def identify(self, view: RowView) -> None:
        """Look up whose rows these are; all of them must still stand."""
        if view.identified:
            return
        index = view.index
        view.rids = self._rid.take(index).tobytes()
        view.attempts = self._attempt.take(index).tobytes()
        view.detokenizers = self._detokenizer.take(index)
        view.prompt_lens = self._prompt_len.take(index)
        view.max_lens = self.max_len.take(index)
        view.origins = self._origin.take(index)
        view.identified = True

    def take_ids(self, view: RowView, ids: I32Array) -> I32Array:
        """One new id for each row of an identified view; returns their positions."""
        index = view.index
        known: I32Array = self.known.take(index)
        self._output_ids[view.origins + known] = ids
        self.known[index] = known + 1
        return known

    def known_ids(self, slot: int) -> bytes:
        """All ids of a row: what it was queued with, and what it generated since."""
        request = self.requests[slot]
        assert request is not None
        start = slot * self._output_bytes
        return request.ids + self._outputs[start : start + (self._known_cells[slot] - request.tokens) * ID_BYTES]
