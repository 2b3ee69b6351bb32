"""The account of KV pages: what rows hold, what the prefix tree keeps, and what would still fit.

`KvCache` serves models all of whose layers attend to all positions: cache group 0 alone. `WindowedKvCache` adds the
pages of layers behind a window, cache group 1 (see `window`). No other file knows which of them it is.
"""

from collections.abc import Callable

import numpy as np

from proto.messages import ID_BYTES, WorkerFacts, column
from scheduler.pages import I32Array, PagePool, rank_among_equals
from scheduler.policy import Obstacle, expected_peak
from scheduler.prefix import PrefixTree
from scheduler.request import Request, State
from scheduler.rows import Rows
from scheduler.window import Window

Headroom = Callable[[int], int]  # pages that admission leaves free, of a pool with so many


class KvCache:
    """Pages of cache group 0. Rows get and give up pages through `Running` only; `Admission` asks what fits.

    Pages that are given up may be handed out again at once: the plan that does so runs after every plan that used them.
    """

    def __init__(self, pool: PagePool, rows: Rows, prefix_caching: bool) -> None:
        self.pool = pool
        self.tree = PrefixTree(pool, prefix_caching)
        self.committed = 0  # pages that all rows are expected to hold at their ends, shared ones counted often
        self._rows = rows
        self._appended: list[tuple[I32Array, I32Array]] = []  # slots and pages that the next plan is to name

    @property
    def available(self) -> int:
        """Pages that rows can get."""
        return self.pool.available

    @property
    def counted_pool(self) -> PagePool:
        """The pool that counters speak of: that of group 0 where it takes memory."""
        return self.pool

    def counters(self) -> dict[str, float]:
        """Pages and evictions, for the heartbeat."""
        pool = self.counted_pool
        return {
            "pages_total": float(pool.num_pages),
            "pages_free": float(pool.free),
            "pages_cached": float(pool.idle),
            "evictions": float(self.tree.evictions),
            "window_pages_total": 0.0,
            "window_pages_free": 0.0,
            "window_pages_cached": 0.0,
            "window_evictions": 0.0,
        }

    # ---------------------------------------------------------------- what fits

    def match(self, request: Request) -> int:
        """Look a request up in the prefix tree as it is now; returns the tokens left to prefill.

        At least the last id is always computed, since its logits are wanted.
        """
        self.tree.match(request.path, request.ids, request.tokens - 1)
        return request.tokens - request.path.length * self.pool.page_size

    def lacking(self, tokens: int) -> tuple[int, int] | None:
        """Pages that a sequence of so many tokens needs and pages that there are, if these are too few for it alone."""
        needed = self.pool.pages_of(tokens)
        return (needed, self.pool.num_pages) if needed > self.pool.num_pages else None

    def obstacle(self, request: Request, headroom: Headroom) -> Obstacle | None:
        """Whether pages for a matched request are missing now, or are not expected to last."""
        pool, path = self.pool, request.path
        left = pool.free + pool.idle - -(-request.tokens // pool.page_size)
        if path.length:
            left += path.length - path.idle_pages
        kept = headroom(pool.num_pages)
        if left < kept:
            if self._rows.count:
                return Obstacle.PAGES
            return None if left >= 0 else Obstacle.PINNED
        if self.committed + request.expected_pages <= pool.num_pages or not self._rows.count:
            return None
        return None if self._peak_with(request) <= pool.num_pages - kept else Obstacle.PAGES

    def pinned_shortage(self, request: Request) -> tuple[int, PagePool]:
        """Pages that a request needs which finds too few though nothing runs, and the pool that lacks them."""
        return self.pool.pages_of(request.tokens), self.pool

    def _peak_with(self, request: Request) -> int:
        """Most pages in use at once if this request is placed and all rows grow as expected."""
        present = [other for other in self._rows.requests if other is not None]
        slots = [other.slot for other in present]
        held = self._rows.room[slots].astype(np.int64) // self.pool.page_size
        expected = np.array([other.expected_pages for other in present], np.int64)
        own = held - np.array([other.hit_pages for other in present], np.int64)
        shared = max(self.pool.used - int(own.sum()), 0)
        needed = self.pool.pages_of(request.tokens)
        growth = np.append(np.maximum(expected - held, 1), max(request.expected_pages - needed, 1))
        peak = expected_peak(np.append(own, needed - request.path.length), growth)
        return shared + request.path.idle_pages + peak

    # ---------------------------------------------------------------- rows

    def allocate_prompt(self, request: Request) -> bytes:
        """Pages for all known ids of a request: those of its matched path, and own ones for the rest."""
        hits, tree = request.path.length, self.tree
        needed = -(-request.tokens // self.pool.page_size) - hits
        if not hits:
            return tree.allocate(needed)
        # Held before the allocation, which may evict what is idle.
        held = tree.hold(request.path)
        return held + tree.allocate(needed)

    def start_row(self, request: Request, table: bytes) -> tuple[bytes, bytes]:
        """A request has entered its slot with these pages; returns the pages of both groups that its plan names."""
        self.committed += request.expected_pages
        return table, b""

    def plan_chunk(self, request: Request, tokens: int, table: bytes) -> int:
        """Plan the next ids of a prefill, whose pages of group 0 are `table`; returns how many have pages.

        Full pages enter the tree once they are planned: later rows, even of the same step, may hit them, since every
        layer writes its K/V before attention reads.
        """
        request.plan_chunk(tokens)
        self.tree.extend(request.path, request.ids, table, request.done // self.pool.page_size)
        return tokens

    def append_pages(self, slots: I32Array, repeated: bool) -> None:
        """Give each of these rows one more page; with `repeated`, a row may stand here several times."""
        ranks = rank_among_equals(slots) if repeated else None
        self._append(slots, ranks)

    def _append(self, slots: I32Array, ranks: I32Array | None) -> I32Array:
        pages = column(self.tree.allocate(len(slots)))
        self._rows.append_pages(slots, pages, ranks)
        self._appended.append((slots, pages))
        return pages

    def drain_appended(self) -> tuple[bytes, bytes, bytes]:
        """Slots, pages and cache groups of the pages that rows got since the last plan, as they travel."""
        if not self._appended:
            return b"", b"", b""
        ((slots, pages),) = self._appended
        self._appended.clear()
        return slots.tobytes(), pages.tobytes(), b""

    def slide(self, slots: I32Array) -> None:
        """Let go of what these rows have behind their windows. Once a plan, before its pages are given out."""

    def slide_requests(self, requests: list[Request]) -> None:
        """`slide` of these requests' rows."""

    def release_rows(self, requests: list[Request], slots: list[int], keep: bool) -> None:
        """Release the pages of these requests in their slots; with `keep`, what they computed enters the tree."""
        release_row = self.tree.release_row
        for request, (table, ids, end) in zip(requests, self._rows.computed(slots), strict=True):
            release_row(request.path, table, ids, end if keep else 0)
            self.committed -= request.expected_pages

    def distrust(self, request: Request) -> None:
        """What this row has computed is not to be trusted: nobody may hit it."""
        self.tree.forget(request.path)

    def flush(self) -> int:
        """Evict all that nobody uses; returns how many pages, of memory, became free."""
        return self.tree.flush()

    def check(self, own: bytes) -> None:
        """Raise PageError unless the account is true, given the rows' own pages of group 0. For tests."""
        self.tree.check(own)

    def check_empty(self) -> None:
        """Raise AssertionError unless no row holds a page. For tests."""
        assert self.pool.available == self.pool.num_pages


class WindowedKvCache(KvCache):
    """Pages of both cache groups, or of group 1 alone; then those of group 0 are *virtual*: numbers without memory."""

    def __init__(self, window: Window, rows: Rows, prefix_caching: bool) -> None:
        super().__init__(window.full, rows, prefix_caching)
        self.window = window

    @property
    def available(self) -> int:
        return min(self.pool.available, self.window.pool.available)

    @property
    def counted_pool(self) -> PagePool:
        return self.window.pool if self.window.virtual else self.pool

    def counters(self) -> dict[str, float]:
        window, pool = self.window, self.window.pool
        if window.virtual:
            return super().counters() | {"evictions": float(window.evictions)}
        return super().counters() | {
            "window_pages_total": float(pool.num_pages),
            "window_pages_free": float(pool.free),
            "window_pages_cached": float(pool.idle),
            "window_evictions": float(window.evictions),
        }

    # ---------------------------------------------------------------- what fits

    def match(self, request: Request) -> int:
        """As above; layers behind a window must have what the first computed id sees."""
        left, path = super().match(request), request.path
        if not path.length:
            return left
        self.tree.match(path, request.ids, self.window.hit_length(path.pages) * self.pool.page_size)
        return request.tokens - path.length * self.pool.page_size

    def lacking(self, tokens: int) -> tuple[int, int] | None:
        needed, there = self.window.least(self.pool.pages_of(tokens)), self.window.pool.num_pages
        return super().lacking(tokens) or ((needed, there) if needed > there else None)

    def obstacle(self, request: Request, headroom: Headroom) -> Obstacle | None:
        """As above for both groups. A chunk takes what pages of group 1 there are, so few must be there."""
        found = super().obstacle(request, headroom)
        if found is not None:
            return found
        window, pool, path = self.window, self.window.pool, request.path
        used, idle = window.hit_pages(path.pages)
        held_from = path.length - used - idle
        needed = window.least(pool.pages_of(request.tokens) - held_from) - used
        if not self._rows.count:
            return None if needed <= pool.available else Obstacle.PINNED
        kept = headroom(pool.num_pages)
        if pool.available - needed - self._owed_to_prefills() < kept:
            return Obstacle.PAGES
        if window.committed + window.plateau(request.expected_pages) <= pool.num_pages:
            return None
        return None if self._window_peak_with(request) <= pool.num_pages - kept else Obstacle.PAGES

    def pinned_shortage(self, request: Request) -> tuple[int, PagePool]:
        needed, pool = super().pinned_shortage(request)
        return (needed, pool) if needed > pool.available else (self.window.least(needed), self.window.pool)

    def _window_peak_with(self, request: Request) -> int:
        """`_peak_with` of group 1. Rows grow no further than to a plateau; so two sums are bounds."""
        window = self.window
        present = [other for other in self._rows.requests if other is not None]
        slots = [other.slot for other in present]
        end = window.end[slots].astype(np.int64)
        expected = np.array([other.expected_pages for other in present], np.int64)
        own = end - np.maximum(window.first[slots], np.array([other.hit_pages for other in present], np.int64))
        _, idle = window.hit_pages(request.path.pages)
        shared = max(window.pool.used - int(own.sum()), 0)
        needed = self.pool.pages_of(request.tokens)
        own = np.append(own, window.least(needed - request.path.length))
        growth = np.append(np.maximum(expected - end, 1), max(request.expected_pages - needed, 1))
        plateaus = np.minimum(own + growth, window.plateau(self._rows.pages.shape[1]))
        return shared + idle + min(expected_peak(own, growth), int(plateaus.sum()))

    def _owed_to_prefills(self) -> int:
        """Pages of group 1 that prefills must yet be able to get, whoever else gets some."""
        window, owed = self.window, 0
        for request in self._rows.requests:
            if request is not None and request.state is State.PREFILL and request.done < request.tokens:
                first, end = int(window.first[request.slot]), int(window.end[request.slot])
                owed += max(window.least(self.pool.pages_of(request.tokens) - first) - (end - first), 0)
        return owed

    # ---------------------------------------------------------------- rows

    def start_row(self, request: Request, table: bytes) -> tuple[bytes, bytes]:
        super().start_row(request, table)
        hits = self.window.start_row(request.slot, request.path.pages, request.expected_pages)
        return (b"" if self.window.virtual else table), hits

    def plan_chunk(self, request: Request, tokens: int, table: bytes) -> int:
        """As above. Prompts get pages of group 1 chunk by chunk, as many as there are."""
        tokens = self.window.extend_row(request.slot, self._rows.pages[request.slot], request.done, tokens)
        super().plan_chunk(request, tokens, table)
        path = request.path
        if path.detached:
            end, at = request.done // self.pool.page_size, path.length * ID_BYTES
            known = self.tree.known_below(path, request.ids, end)
            self.window.share_with(table[at : at + len(known)], known)
        return tokens

    def _append(self, slots: I32Array, ranks: I32Array | None) -> I32Array:
        pages = super()._append(slots, ranks)
        self.window.append_pages(slots, pages, ranks)
        return pages

    def drain_appended(self) -> tuple[bytes, bytes, bytes]:
        taken = self.window.drain_appended([] if self.window.virtual else self._appended)
        self._appended.clear()
        return taken

    def slide(self, slots: I32Array) -> None:
        """A row with unknown ids in flight keeps what its last known one sees."""
        rows = self._rows
        self.window.slide(slots, np.minimum(rows.planned[slots], rows.outputs.known[slots] - 1))

    def slide_requests(self, requests: list[Request]) -> None:
        if requests:
            self.slide(np.array([request.slot for request in requests], np.int32))

    def release_rows(self, requests: list[Request], slots: list[int], keep: bool) -> None:
        self.window.release_slots(slots, [request.expected_pages for request in requests])
        super().release_rows(requests, slots, keep)

    def distrust(self, request: Request) -> None:
        below = self.tree.known_below(request.path, request.ids, request.tokens // self.pool.page_size)
        self.window.distrust(request.path.pages + below)
        super().distrust(request)

    def flush(self) -> int:
        window = self.window
        pools = [window.pool] if window.virtual else [self.pool, window.pool]
        before = sum(pool.free for pool in pools)
        self.tree.flush()
        window.flush()
        return sum(pool.free for pool in pools) - before

    def check(self, own: bytes) -> None:
        super().check(own)
        requests = [request for request in self._rows.requests if request is not None]
        self.window.check([request.slot for request in requests])
        assert self.window.committed == sum(self.window.plateau(request.expected_pages) for request in requests)

    def check_empty(self) -> None:
        super().check_empty()
        assert self.window.pool.available == self.window.pool.num_pages


def make_cache(facts: WorkerFacts, rows: Rows, prefix_caching: bool) -> KvCache:
    """The account of a worker's pages."""
    if facts.window:
        return WindowedKvCache(Window(facts, rows.capacity), rows, prefix_caching)
    return KvCache(PagePool(facts.num_pages, facts.page_size), rows, prefix_caching)
