"""Pages of the layers behind a window (cache group 1), each paired with a page of group 0.

A row holds them from the first that its next id sees; what lies wholly behind is dropped. Which ids a page holds is
said by the page of group 0 that it is paired with: so the prefix tree serves both groups, and whatever takes a page out
of it takes its pair along. A page of group 1 has *users*, the rows that hold it, and an *owner*, the page of group 0.
Without users it is *idle* if it has an owner: its content may be hit, and it may be evicted. Without either it is free.

In a model all of whose layers have a window, group 0 is *virtual*: its pages are numbers that cost no memory and never
travel. They carry the ids.
"""

from typing import TYPE_CHECKING

import numpy as np

from proto.cache import window_reach
from proto.messages import I32, U8, WorkerFacts, column
from scheduler.pages import I32Array, PageError, PagePool

if TYPE_CHECKING:
    pass

_NOBODY = -1
_BATCH_PART = 64  # of the pool, evicted at once: finding what is oldest takes a look at every page
_AGES = 1 << 24  # more than pages of a row: room between two ticks of the clock for an order within a row


class Window:
    """Which row holds which page of group 1. Driven by `WindowedKvCache`, which has the rows and the tree."""

    def __init__(self, facts: WorkerFacts, capacity: int) -> None:
        self.pool = PagePool(facts.window_pages, facts.page_size)
        self.virtual = not facts.num_pages
        # Pages before its own that an id at the beginning of a page sees.
        self.reach = window_reach(facts.window, facts.page_size)
        self.evictions = 0
        self.committed = 0  # as `KvCache.committed`
        max_pages = self.pool.pages_of(facts.max_model_len)
        self.full = self._full_pool(facts, capacity, max_pages)
        self._window = facts.window
        self._paired = np.full(self.full.num_pages, _NOBODY, I32)  # by page of group 0: its page of group 1
        self._owner = np.full(facts.window_pages, _NOBODY, I32)
        self._users = np.zeros(facts.window_pages, np.int32)
        self._age = np.zeros(facts.window_pages, np.int64)  # of idle pages: the lowest goes first
        self._clock = 0
        self._batch = facts.window_pages // _BATCH_PART
        self._tables = np.zeros((capacity, max_pages), I32)  # from page number 0 on; what is behind the window is stale
        self.first = np.zeros(capacity, np.int32)  # page numbers first..end are held
        self.end = np.zeros(capacity, np.int32)
        self._appended: list[tuple[I32Array, I32Array]] = []  # slots and pages that the next plan is to name

    def _full_pool(self, facts: WorkerFacts, capacity: int, max_pages: int) -> PagePool:
        """Make the pool of group 0.

        Virtual pages suffice for the longest rows that group 1 can hold and as many cached ones, but are no more than
        all slots can hold and two cached pages for each page of group 1.
        """
        pages = facts.num_pages
        if self.virtual:
            pages_each = -(-max_pages // (self.reach + 1))  # of group 0 for one of group 1
            pages = min(2 * pages_each * facts.window_pages, capacity * max_pages + 2 * facts.window_pages)
            pages = max(pages, max_pages)
        return PagePool(pages, facts.page_size, on_release=self._unpair_released)

    # ---------------------------------------------------------------- what fits

    def least(self, pages: int) -> int:
        """Return how many pages a row must be able to hold at once in order to reach so many."""
        return min(pages, self.reach + 1)

    def plateau(self, pages: int) -> int:
        """Return how many pages a row holds that has reached so many; the newest may hold one id."""
        return min(pages, self.reach + 2)

    def hit_length(self, path: bytes) -> int:
        """Return how many pages of a path of group 0 can be hit: the most whose windows still have all their pages."""
        pages = column(path)
        absent = np.flatnonzero(self._paired.take(pages) == _NOBODY)
        if not absent.size or (absent[-1] < pages.size - self.reach):
            return pages.size
        edges = np.concatenate([[-1], absent, [pages.size]])
        runs = np.diff(edges) - 1
        enough = runs >= self.reach
        enough[0] = True  # the beginning of a prompt has nothing before it
        return int(edges[1:][enough][-1])

    def hit_pages(self, path: bytes) -> tuple[int, int]:
        """Return how many pages of group 1 a hit of these pages takes that are in use, and how many that are idle."""
        pages = self._paired.take(column(path)[-self.reach :]) if self.reach else column(b"")
        used = int(np.count_nonzero(self._users.take(pages)))
        return used, pages.size - used

    # ---------------------------------------------------------------- rows

    def start_row(self, slot: int, path: bytes, expected: int) -> bytes:
        """Start a row behind a hit of these pages of group 0 that is expected to end with so many; returns the pages of
        group 1 that it holds of the hit."""
        self.committed += self.plateau(expected)
        hits = column(path)
        self.end[slot] = end = hits.size
        self.first[slot] = first = max(end - self.reach, 0)
        pages = self._paired.take(hits[first:])
        if (pages == _NOBODY).any():
            raise PageError("a path is held whose windowed pages are gone")
        self.pool.idle -= int(np.count_nonzero(self._users.take(pages) == 0))
        self._users[pages] += 1
        self._tables[slot, first:end] = pages
        return pages.tobytes()

    def extend_row(self, slot: int, table: I32Array, done: int, tokens: int) -> int:
        """Allocate pages for the next `tokens` ids from `done` on, or for as many as possible; returns for how many.

        `table` has the row's pages of group 0.
        """
        end = int(self.end[slot])
        more = min(self.pool.pages_of(done + tokens) - end, self.pool.available)
        if more > 0:
            pages = self._allocate(more)
            self._pair(table[end : end + more], pages)
            self._tables[slot, end : end + more] = pages
            self.end[slot] = end = end + more
            self._appended.append((np.full(more, slot, np.int32), pages))
        return min(tokens, end * self.pool.page_size - done)

    def append_pages(self, slots: I32Array, full: I32Array, ranks: I32Array | None) -> None:
        """Give each of these rows one more page, paired with these of group 0; `ranks` as in `Rows.append_pages`."""
        pages = self._allocate(slots.size)
        self._pair(full, pages)
        end = self.end[slots] if ranks is None else self.end[slots] + ranks
        self._tables[slots, end] = pages
        self.end[slots] = end + 1
        self._appended.append((slots, pages))

    def slide(self, slots: I32Array, next_ids: I32Array) -> None:
        """Drop what these rows, whose next ids are at these positions, have behind their windows."""
        firsts = (next_ids - (self._window - 1)) // self.pool.page_size
        moved = np.flatnonzero(firsts > self.first[slots])
        if moved.size:
            self._drop(slots[moved], firsts[moved], sliding=True)

    def release_slots(self, slots: list[int], expected: list[int]) -> None:
        """Drop all pages of rows that end or are preempted; so many pages had been expected of each."""
        self.committed -= sum(map(self.plateau, expected))
        index = np.array(slots, np.int32)
        self._drop(index, self.end[index], sliding=False)

    def drain_appended(self, full: list[tuple[I32Array, I32Array]]) -> tuple[bytes, bytes, bytes]:
        """Return slots, pages and groups of all pages that the plan appends, given those of group 0."""
        appended = full + self._appended
        self._appended.clear()
        if not appended:
            return b"", b"", b""
        all_slots, all_pages = (np.concatenate(columns) for columns in zip(*appended, strict=True))
        groups = np.ones(all_slots.size, U8)
        groups[: sum(slots.size for slots, _ in full)] = 0
        return all_slots.astype(I32).tobytes(), all_pages.astype(I32).tobytes(), groups.tobytes()

    # ---------------------------------------------------------------- pairs

    def _unpair_released(self, full: bytes) -> None:
        """Unpair pages of group 0 that have become free. Called by their pool."""
        if full:
            self.unpair(column(full))

    def unpair(self, full: I32Array) -> None:
        """Dissolve the pairs of these pages of group 0; what nobody uses becomes free."""
        pages = self._paired.take(full)
        self._paired[full] = _NOBODY
        pages = pages[pages != _NOBODY]
        self._owner[pages] = _NOBODY
        free = pages[self._users.take(pages) == 0]
        self.pool.idle -= free.size
        self.pool.release(free.tobytes())

    def share_with(self, own: bytes, known: bytes) -> None:
        """Pair the tree's pages `known`, where they have lost their pairs, with those of a row's `own` pages.

        The row computes the same ids; so they can be hit again.
        """
        mine, theirs = column(own), column(known)
        pages = self._paired.take(mine)
        moved = (pages != _NOBODY) & (self._paired.take(theirs) == _NOBODY)
        self._paired[mine[moved]] = _NOBODY
        self._paired[theirs[moved]] = pages[moved]
        self._owner[pages[moved]] = theirs[moved]

    def distrust(self, full: bytes) -> None:
        """Unpair these pages so that nobody can hit their content, except where several rows hold it already."""
        pages = column(full)
        paired = self._paired.take(pages)
        self.unpair(
            pages[(paired != _NOBODY) & (self._users.take(paired) < 2)]
        )  # of _NOBODY the last's, which is masked

    def flush(self) -> int:
        """Evict all idle pages and return their number."""
        count = self.pool.idle
        if count:
            self._evict(count)
        return count

    # ---------------------------------------------------------------- pages

    def _pair(self, full: I32Array, pages: I32Array) -> None:
        self._paired[full] = pages
        self._owner[pages] = full
        self._users[pages] = 1

    def _allocate(self, count: int) -> I32Array:
        short = count - self.pool.free
        if short > 0:
            self._evict(max(short, min(self.pool.idle, self._batch)))
        return column(self.pool.pop(count))

    def _evict(self, count: int) -> None:
        idle = np.flatnonzero((self._users == 0) & (self._owner != _NOBODY))
        if idle.size < count:
            raise PageError(f"{count} windowed pages to evict, {idle.size} are idle")
        oldest = idle[np.argpartition(self._age.take(idle), count - 1)[:count]]
        self.evictions += count
        self.unpair(self._owner.take(oldest))

    def _drop(self, slots: I32Array, firsts: I32Array, sliding: bool) -> None:
        """Drop the pages of these rows before these numbers. A page loses one user for each row that held it.

        Within a row the pages before others go last: beginnings are shared most. What a row slides over is of use to
        those that part from it there; so all but its beginning goes first of all.
        """
        counts = firsts - self.first[slots]
        ends = np.cumsum(counts)
        numbers = np.arange(counts.sum()) + np.repeat(firsts - ends, counts)
        pages = self._tables[np.repeat(slots, counts), numbers]
        self.first[slots] = firsts
        np.subtract.at(self._users, pages, 1)
        left, at = np.unique(pages, return_index=True)
        unused = self._users.take(left) == 0
        left, numbers = left[unused], numbers[at[unused]]
        owned = self._owner.take(left) != _NOBODY
        idle = left[owned]
        self._clock += 1
        ticks = np.where(numbers[owned] < self.reach, self._clock, 0) if sliding else self._clock
        self._age[idle] = ticks * _AGES - numbers[owned]
        self.pool.idle += idle.size
        self.pool.release(left[~owned].astype(I32).tobytes())

    def check(self, slots: list[int]) -> None:
        """Raise PageError unless users, owners and the pool agree, given the slots of all rows. For tests."""
        users = np.zeros_like(self._users)
        for slot in slots:
            np.add.at(users, self._tables[slot, self.first[slot] : self.end[slot]], 1)
        if not np.array_equal(users, self._users):
            raise PageError("users of windowed pages are miscounted")
        owned = np.flatnonzero(self._owner != _NOBODY)
        standing = np.flatnonzero(self._paired != _NOBODY)
        if owned.size != standing.size or not np.array_equal(self._paired[self._owner[owned]], owned):
            raise PageError("a windowed page and its owner disagree")
        if np.isin(column(bytes(self.full._stack)), standing).any():
            raise PageError("a windowed page is paired with a free page")
        idle = owned[users[owned] == 0]
        if idle.size != self.pool.idle:
            raise PageError(f"{idle.size} idle windowed pages, counted {self.pool.idle}")
        self.pool.check(np.union1d(owned, np.flatnonzero(users)).astype(I32).tobytes())
