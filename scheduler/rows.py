"""Columns over slots: all that a step changes of every row, and nothing that it does not."""

import struct

import numpy as np
import numpy.typing as npt

from proto.messages import I32, U32, U64
from scheduler.pages import I32Array
from scheduler.request import ID_BYTES, Request

Mask = npt.NDArray[np.bool_]


# Columns of `Rows.fixed`, and a row of it.
_RID, _ATTEMPT, _GENERATION, _PROMPT_LEN, _MAX_LEN, _DETOKENIZER = range(6)
_FIXED = struct.Struct("<6Q")


class RowView:
    """Rows of a step, in plan order, with what does not change while a row keeps its slot.

    A copy, so it stays true for results that come after slots have changed hands. What every step asks for is
    made once and kept: the view of a steady batch lives long.
    """

    __slots__ = ("_attempts", "_fixed", "_max_lens", "_prompt_lens", "_rids", "departures", "index", "slots")

    def __init__(self, slots: I32Array, fixed: npt.NDArray[np.uint64], departures: int) -> None:
        self.slots = slots
        self.index = slots.astype(np.intp)  # numpy gathers several times faster with its own index type
        self.departures = departures  # `Rows.departures` then: unchanged means that all rows still stand
        self._fixed = fixed  # [R, 6] uint64
        self._prompt_lens: I32Array | None = None
        self._max_lens: I32Array | None = None
        self._rids: bytes | None = None
        self._attempts: bytes | None = None

    def __len__(self) -> int:
        return self.slots.size

    def only(self, mask: Mask) -> "RowView":
        return RowView(self.slots[mask], self._fixed[mask], self.departures)

    @property
    def generations(self) -> I32Array:
        return self._fixed[:, _GENERATION].astype(np.int32)

    @property
    def detokenizers(self) -> I32Array:
        return self._fixed[:, _DETOKENIZER].astype(np.int32)

    @property
    def prompt_lens(self) -> I32Array:
        if self._prompt_lens is None:
            self._prompt_lens = self._fixed[:, _PROMPT_LEN].astype(np.int32)
        return self._prompt_lens

    @property
    def max_lens(self) -> I32Array:
        if self._max_lens is None:
            self._max_lens = self._fixed[:, _MAX_LEN].astype(np.int32)
        return self._max_lens

    @property
    def rids(self) -> bytes:
        """The column as it travels."""
        if self._rids is None:
            self._rids = self._fixed[:, _RID].astype(U64).tobytes()
        return self._rids

    @property
    def attempts(self) -> bytes:
        if self._attempts is None:
            self._attempts = self._fixed[:, _ATTEMPT].astype(U32).tobytes()
        return self._attempts


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
        self.fixed = np.zeros((capacity, 6), U64)
        self._fixed_bytes = self.fixed.data.cast("B")
        self.known = np.zeros(capacity, np.int32)
        self.planned = np.zeros(capacity, np.int32)
        self.room = np.zeros(capacity, np.int32)  # tokens that the row's pages hold
        self.last_id = np.zeros(capacity, np.int32)
        self.pages = np.zeros((capacity, max_pages), np.int32)
        self._flat_pages = self.pages.reshape(-1)
        self.requests: list[Request | None] = [None] * capacity
        self.departures = 0
        self._generated = np.zeros(num_pages * page_size, np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, request: Request, pages: I32Array) -> int:
        """Put a request into a slot with pages for all its known ids."""
        slot = self._free.pop()
        tokens = request.tokens
        # Not by numpy, which would make an array of the tuple first.
        _FIXED.pack_into(
            self._fixed_bytes,
            slot * _FIXED.size,
            request.rid,
            request.attempt,
            int(self.generation[slot]),
            request.prompt_len,
            request.max_len,
            request.detokenizer,
        )
        self.known[slot] = tokens
        self.room[slot] = pages.size * self.page_size
        self.last_id[slot] = int.from_bytes(request.ids[-ID_BYTES:], "little")
        self.pages[slot, : pages.size] = pages
        self.requests[slot] = request
        request.slot = slot
        return slot

    def leave(self, slots: list[int]) -> I32Array:
        """Empty these slots; returns all their pages, row after row. Results on their way no longer count."""
        self.departures += 1
        self.generation[slots] += 1
        held = [self.held(slot) for slot in slots]
        for slot in slots:
            request = self.requests[slot]
            assert request is not None
            request.slot = -1
            self.requests[slot] = None
        self._free.extend(slots)
        return np.concatenate(held) if len(held) > 1 else held[0].copy()

    def held(self, slot: int) -> I32Array:
        """A slot's pages from position 0 on; a view into its table."""
        return self.pages[slot, : int(self.room[slot]) // self.page_size]

    def append(self, slots: I32Array, pages: I32Array) -> None:
        """One more page for each of these rows."""
        room = self.room[slots]
        self.pages[slots, room // self.page_size] = pages
        self.room[slots] = room + self.page_size

    def view(self, slots: I32Array) -> RowView:
        return RowView(slots, self.fixed[slots], self.departures)

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
        start, known = request.tokens, int(self.known[slot])
        if known == start:
            return request.ids
        size = self.page_size
        first = start // size
        pages = self.pages[slot, first : -(-(known - 1) // size)]
        generated = self._generated.reshape(-1, size)[pages].ravel()[start - first * size : known - 1 - first * size]
        return request.ids + generated.astype(I32).tobytes() + int(self.last_id[slot]).to_bytes(ID_BYTES, "little")
