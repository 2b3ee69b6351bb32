"""The pages of every slot in one cache group, and the lists of a step that are made of them."""

import numpy as np
import numpy.typing as npt

from proto.cache import window_reach
from worker.steps.batch import I32Array, PageLists
from worker.steps.sequence import PlanError

_NOTHING = np.zeros(0, np.int32)


class PageTable:
    """Page ids by slot and page number.

    With a window, rows' lists begin at the first page that the row's first id of the step sees: pages before it may
    belong to others by now, though the table still names them. With a `stride`, lists begin at the multiple of it
    before; only for a device that makes the lists itself, and names none of those pages. `lists_pages`: see
    `SlotTables`; without it the table keeps what plans have placed since `forget_placed` instead.
    """

    def __init__(
        self,
        *,
        slots: int,
        width: int,
        num_pages: int,
        page_size: int,
        window: int = 0,
        stride: int = 1,
        lists_pages: bool = True,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self._stride = stride
        self._lists_pages = lists_pages
        self._pages = np.zeros((slots, width), np.int32)
        self._flat_pages = self._pages.reshape(-1)
        self._ends = np.zeros(slots, np.int32)  # numbers after the last
        self._placed: list[tuple[I32Array, I32Array]] = []
        self._version = 0  # of the newest lists

    # ------------------------------------------------------------------ pages of slots

    def admit(self, slot: int, first: int, pages: I32Array) -> None:
        """Put a request into a slot with pages from number `first` on."""
        end, width = first + len(pages), self._pages.shape[1]
        if end > width:
            raise PlanError(f"admits slot {slot} with {end} pages; {width} is the most")
        self._check_pages(pages)
        self._pages[slot, first:end] = pages
        self._ends[slot] = end
        if not self._lists_pages:
            begin = slot * width
            self._placed.append((np.arange(begin + first, begin + end, dtype=np.int32), pages))

    def admit_behind(self, slot: int, start: int, pages: I32Array) -> None:
        """Put a request into a slot with `start` ids cached and those of their pages that the next id sees."""
        end, past = divmod(start, self.page_size)
        first = max(end - window_reach(self.window, self.page_size), 0)
        if past or end - first != len(pages):
            raise PlanError(
                f"admits slot {slot} with {start} ids cached, {len(pages)} pages of them in a window of {self.window}"
            )
        self.admit(slot, first, pages)

    def append(self, slots: I32Array, pages: I32Array) -> None:
        """Give each slot one more page; a slot may be named often."""
        self._check_pages(pages)
        at = self._ends[slots] + _rank_among_equals(slots)
        if outside(at, self._pages.shape[1]):
            raise PlanError(f"appends more than {self._pages.shape[1]} pages to slot {int(slots[at.argmax()])}")
        places = self._begins(slots) + at
        self._flat_pages[places] = pages
        # Of equal slots the last one has the highest count, and numpy assigns in order.
        self._ends[slots] = at + np.int32(1)
        if not self._lists_pages:
            self._placed.append((places.astype(np.int32), pages))

    def forget_placed(self) -> None:
        """Forget what `placed` would return."""
        self._placed.clear()

    def placed(self) -> tuple[I32Array, I32Array]:
        """Pages placed since `forget_placed`: where in the table (slot × width + page number), and their ids."""
        if not self._placed:
            return _NOTHING, _NOTHING
        places, pages = zip(*self._placed, strict=True)
        return np.concatenate(places), np.concatenate(pages)

    def check_decode(self, slots: I32Array, positions: I32Array, page_index: I32Array) -> None:
        lacking = page_index >= self._ends.take(slots)
        if np.count_nonzero(lacking):
            row = int(lacking.argmax())
            raise PlanError(f"decodes slot {int(slots[row])} at position {int(positions[row])}, which has no page")

    def check_prefill(self, slot: int, end: int) -> None:
        if end > int(self._ends[slot]) * self.page_size:
            raise PlanError(f"prefills slot {slot} up to position {end}; it has {int(self._ends[slot])} pages")

    def _check_pages(self, pages: I32Array) -> None:
        if outside(pages, self.num_pages):
            bad = int(pages[(pages < 0) | (pages >= self.num_pages)][0])
            raise PlanError(f"page {bad} is outside the pool 0..{self.num_pages - 1}")

    # ------------------------------------------------------------------ lists of a step

    def lists(
        self,
        slots: I32Array,
        starts: I32Array,
        used: I32Array,
        token_slots: I32Array,
        positions: I32Array,
        page_index: I32Array,
    ) -> PageLists:
        """Make the lists of rows [R] in these slots that begin at positions `starts` and reach into `used` pages.

        Their tokens [T] are given by slot, position and page number.
        """
        kv_slots = _NOTHING
        if self._lists_pages:
            pages = self._flat_pages.take(self._begins(token_slots) + page_index)
            # page × size + position % size, without the slow remainder
            kv_slots = (pages - page_index) * np.int32(self.page_size) + positions
        first = self._first_seen(starts)
        kv_indptr = np.zeros(len(slots) + 1, np.int32)
        (used - self._first_listed(first)).cumsum(out=kv_indptr[1:])
        return self._lists(slots, kv_slots, kv_indptr, first)

    def advance(
        self, before: PageLists, slots: I32Array, positions: I32Array, entering: npt.NDArray[np.intp]
    ) -> PageLists:
        """Make the lists of the same decode rows one token on; those `entering` begin a page."""
        kv_slots = before.kv_slots + np.int32(1) if self._lists_pages else _NOTHING
        first = self._first_seen(positions) if self.window else before.first_pages
        if not len(entering) and (not self.window or np.array_equal(first, before.first_pages)):
            return PageLists(kv_slots, before.kv_indptr, before.kv_indices, before.first_pages, before.list_version)
        more = np.zeros(len(before.kv_indptr), np.int32)
        if self.window:
            more[1:] = self._first_listed(before.first_pages) - self._first_listed(first)
        if len(entering):
            more[entering + 1] += np.int32(1)
            entered, at = slots.take(entering), positions.take(entering)
            page_index = at // self.page_size
            self.check_decode(entered, at, page_index)
            if self._lists_pages:
                pages = self._flat_pages.take(self._begins(entered) + page_index)
                kv_slots[entering] = pages * np.int32(self.page_size)
        return self._lists(slots, kv_slots, before.kv_indptr + more.cumsum(dtype=np.int32), first)

    def _first_seen(self, positions: I32Array) -> I32Array:
        """Return the number of the first page that an id at each position sees."""
        if not self.window:
            return np.zeros(len(positions), np.int32)
        first: I32Array = np.maximum((positions - np.int32(self.window - 1)) // self.page_size, 0)
        return first

    def _first_listed(self, first: I32Array) -> I32Array:
        """Return the page number at which lists begin whose rows see pages from number `first` on."""
        return first if self._stride == 1 else first - first % np.int32(self._stride)

    def _begins(self, slots: I32Array) -> npt.NDArray[np.intp]:
        """Return where the page tables of slots begin in `_flat_pages`."""
        return slots.astype(np.intp) * self._pages.shape[1]

    def _lists(self, slots: I32Array, kv_slots: I32Array, kv_indptr: I32Array, first: I32Array) -> PageLists:
        """New lists: pages of each slot from number `first` on, slot by slot, as many as `kv_indptr` has room for."""
        self._version += 1
        kv_indices = _NOTHING
        if self._lists_pages:
            begins = self._begins(slots) - kv_indptr[:-1]
            if self.window:
                begins += first
            kv_indices = self._flat_pages.take(begins.repeat(np.diff(kv_indptr)) + np.arange(kv_indptr[-1]))
        return PageLists(kv_slots, kv_indptr, kv_indices, first, self._version)


def outside(values: I32Array, limit: int) -> bool:
    """Return whether a value is outside 0..limit - 1. One comparison will do: unsigned, a negative value is large."""
    return len(values) > 0 and int(np.maximum.reduce(values.view(np.uint32))) >= limit


def _rank_among_equals(slots: I32Array) -> I32Array:
    """Return for each element the number of equal ones before it."""
    listed = slots.tolist()
    ranks = np.zeros(len(listed), np.int32)
    if len(set(listed)) < len(listed):
        seen: dict[int, int] = {}
        for i, slot in enumerate(listed):
            ranks[i] = seen.get(slot, 0)
            seen[slot] = int(ranks[i]) + 1
    return ranks
