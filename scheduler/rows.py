"""Columns over slots: all that a step changes of every row, and nothing that it does not."""

import numpy as np
import numpy.typing as npt

from proto.messages import I32, U32, U64, column
from scheduler.pages import PAGE_ID_BYTES, I32Array
from scheduler.request import ID_BYTES, Request

Mask = npt.NDArray[np.bool_]


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
        "prompt_lens",
        "rids",
        "slots",
    )

    rids: bytes  # as they travel
    attempts: bytes
    detokenizers: I32Array
    prompt_lens: I32Array
    max_lens: I32Array

    def __init__(self, slots: I32Array, index: npt.NDArray[np.intp], generations: I32Array, departures: int) -> None:
        self.slots = slots
        self.index = index  # the slots: numpy gathers several times faster with its own index type
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
        return part


class Rows:
    """State of every slot, and the ids that rows generated.

    `known` counts ids that results have brought; `planned` counts ids whose K/V are in the cache once all
    planned steps have run. A decode step feeds the id at position `planned` and samples the next one.
    Generated ids lie beside their K/V, by page, except the newest of a row, whose page may not exist yet.
    """

    def __init__(self, capacity: int, max_pages: int, num_pages: int, page_size: int) -> None:
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
        self.last_id = np.zeros(capacity, np.int32)
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
                self.last_id,
            )
        ]
        self._generation_cells = self.generation.data
        self.requests: list[Request | None] = [None] * capacity
        self.departures = 0
        self._generated_pages = np.zeros((num_pages, page_size), I32)
        self._generated = self._generated_pages.reshape(-1)
        self._generated_bytes = self._generated_pages.data.cast("B")
        self._ids_bytes = page_size * ID_BYTES  # of a page
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, request: Request, pages: bytes) -> int:
        """Put a request into a slot with pages for all its known ids."""
        slot = self._free.pop()
        tokens, ids = request.tokens, request.ids
        count = len(pages) // PAGE_ID_BYTES
        rid, attempt, detokenizer, prompt_len, max_len, known, planned, room, last_id = self._cells
        rid[slot] = request.rid
        attempt[slot] = request.attempt
        detokenizer[slot] = request.detokenizer
        prompt_len[slot] = request.prompt_len
        max_len[slot] = request.max_len
        known[slot] = tokens
        planned[slot] = request.done
        room[slot] = count * self.page_size
        last_id[slot] = int.from_bytes(ids[-ID_BYTES:], "little")
        at = slot * self._row_bytes
        self._page_bytes[at : at + len(pages)] = pages
        begun = tokens % self.page_size
        if begun:
            # Generated ids will follow in that page.
            cell = int(self.pages[slot, count - 1]) * self._ids_bytes
            self._generated_bytes[cell : cell + begun * ID_BYTES] = ids[-begun * ID_BYTES :]
        self.requests[slot] = request
        request.slot = slot
        return slot

    def leave(self, slots: list[int]) -> None:
        """Empty these slots. Results on their way no longer count."""
        self.departures += 1
        requests = self.requests
        for slot in slots:
            request = requests[slot]
            assert request is not None
            request.slot = -1
            requests[slot] = None
            self._generation_cells[slot] += 1
        self._free += slots

    def table(self, slot: int) -> bytes:
        """A row's pages, from position 0 on."""
        at = slot * self._row_bytes
        return bytes(self._page_bytes[at : at + int(self.room[slot]) // self.page_size * PAGE_ID_BYTES])

    def computed(self, slots: list[int]) -> list[tuple[bytes, bytes, int]]:
        """Of each row its pages, its ids as far as whole pages of K/V are computed at least, and how many these are.

        The newest id's K/V are not computed yet.
        """
        size, index = self.page_size, np.array(slots, np.intp)
        rooms, knowns = self.room.take(index).tolist(), self.known.take(index).tolist()
        columns = []
        for slot, room, known in zip(slots, rooms, knowns, strict=True):
            request = self.requests[slot]
            assert request is not None
            at = slot * self._row_bytes
            table = bytes(self._page_bytes[at : at + room // size * PAGE_ID_BYTES])
            ids, first, end = request.ids, request.tokens // size, (known - 1) // size
            if end > first:
                generated = self._generated_pages[self.pages[slot, first:end]]
                ids = ids[: first * self._ids_bytes] + generated.tobytes()
            columns.append((table, ids, end))
        return columns

    def append(self, slots: I32Array, pages: I32Array) -> None:
        """One more page for each of these rows."""
        room = self.room[slots]
        self.pages[slots, room // self.page_size] = pages
        self.room[slots] = room + self.page_size

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
        view.identified = True

    def take_ids(self, view: RowView, ids: I32Array) -> I32Array:
        """One new id for each row; returns their positions.

        The row's previous id has a page by now (its K/V were computed to sample the new one): it moves there.
        """
        index = view.index
        known: I32Array = self.known.take(index)
        before = known - 1
        number = before // self.page_size
        pages = self._flat_pages.take(index * self.pages.shape[1] + number)
        # page × size + before % size, without the slow remainder
        cells = (pages - number) * self.page_size + before
        self._generated[cells.astype(np.intp)] = self.last_id.take(index)
        self.last_id[index] = ids
        self.known[index] = known + 1
        return known

    def known_ids(self, slot: int) -> bytes:
        """All ids of a row: what it was queued with, and what it generated since."""
        request = self.requests[slot]
        assert request is not None
        known = int(self.known[slot])
        if known == request.tokens:
            return request.ids
        first, end = request.tokens // self.page_size, -(-(known - 1) // self.page_size)
        generated = self._generated_pages[self.pages[slot, first:end]].tobytes()
        start, stop = first * self.page_size * ID_BYTES, (known - 1) * ID_BYTES
        return request.ids[:start] + generated[: stop - start] + int(self.last_id[slot]).to_bytes(ID_BYTES, "little")
