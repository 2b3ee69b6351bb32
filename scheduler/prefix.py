"""The prefix tree: full pages of known ids, shared between requests of equal salt.

A node is one full page and is named by its page id; an edge is the page's ids. So the tree is one dict from
(parent, ids of the page) to page, and a root is a salt. Whoever uses a node uses its whole path, hence an
idle node has idle descendants only, and evicting idle leaves, oldest first, reaches every idle page. After
RadixAttention (Zheng et al. 2024), with pages for tokens.
"""

import heapq

import numpy as np

from scheduler.pages import I32Array, PageError, PagePool

_ID_BYTES = 4
_COMPACT_SLACK = 1024

Key = tuple[int | str, bytes]  # (parent page, or the salt at the root; ids of the page)


class Path:
    """A way down the tree, kept between visits: the nodes that hold a request's first pages.

    A node that was evicted since is noticed by its birth, and then everything below it is gone too.
    """

    __slots__ = ("births", "pages", "salt", "severed")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.pages: list[int] = []
        self.births: list[int] = []
        self.severed = False  # the row computes a page that the tree has from another: it adds no more

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def tip(self) -> int | str:
        return self.pages[-1] if self.pages else self.salt


class PrefixTree:
    """Match, insert and evict pages of one pool. With `enabled` false it stays empty."""

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.evictions = 0
        self._enabled = enabled
        self._page_bytes = pool.page_size * _ID_BYTES
        self._nodes: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * pool.num_pages
        self._births = [0] * pool.num_pages  # serial of the insertion; 0 = not in the tree
        self._children = np.zeros(pool.num_pages, np.int32)
        self._last_use = np.zeros(pool.num_pages, np.int64)
        self._serial = 0
        self._clock = 0
        # (last use, page, birth) of idle leaves; entries go stale and are skipped when popped.
        self._leaves: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, path: Path, ids: bytes, tokens: int) -> None:
        """Make `path` the longest cached one of whole pages of the first `tokens` ids.

        Resumes from where the path still stands, so that a second look costs O(what changed).
        """
        pages, births = path.pages, path.births
        end = tokens // self.pool.page_size
        while pages and (len(pages) > end or self._births[pages[-1]] != births[-1]):
            pages.pop()
            births.pop()
        path.severed = False
        size, nodes, parent = self._page_bytes, self._nodes, path.tip
        for at in range(len(pages) * size, end * size, size):
            page = nodes.get((parent, ids[at : at + size]))
            if page is None:
                return
            pages.append(page)
            births.append(self._births[page])
            parent = page

    def extend(self, path: Path, ids: bytes, table: I32Array, end: int, leaving: bool = False) -> None:
        """Enter a row's own pages (from its page table), from the path's tip up to page number `end`.

        Where the tree has an equal page already, a row that goes on must stop (it does not use that page,
        so what it adds below could outlive its parent); one that is leaving goes on below the tree's page.
        """
        if not self._enabled or path.severed:
            if not leaving or not self._enabled:
                return
            path.severed = False
        size, nodes, parent = self._page_bytes, self._nodes, path.tip
        first = len(path.pages)
        for number, own in enumerate(table[first:end].tolist(), first):
            key = (parent, ids[number * size : (number + 1) * size])
            page = nodes.get(key)
            if page is None:
                page = own
                self._enter(key, page)
            elif not leaving:
                path.severed = True
                return
            path.pages.append(page)
            path.births.append(self._births[page])
            parent = page

    def _enter(self, key: Key, page: int) -> None:
        self._serial += 1
        self._nodes[key] = page
        self._keys[page] = key
        self._births[page] = self._serial
        self.pool.cached[page] = True
        if not isinstance(key[0], str):
            self._children[key[0]] += 1

    def forget(self, path: Path) -> None:
        """Take the pages that only this path's row uses out of the tree: their content is not to be trusted."""
        while path.pages and not self._children[path.pages[-1]] and self.pool.users[path.pages[-1]] == 1:
            page = path.pages.pop()
            path.births.pop()
            self._remove(page)
            self.pool.cached[page] = False
        path.severed = True

    def pin(self, path: Path) -> None:
        """Hold a matched path against eviction until `unpin`."""
        self.pool.retain(np.array(path.pages, np.int32))

    def unpin(self, path: Path) -> None:
        self.release(np.array(path.pages, np.int32))

    def allocate(self, count: int) -> I32Array:
        """Pages with one user each; evicts idle ones when too few are free. Raises PageError beyond `available`."""
        short = count - self.pool.free
        if short > 0:
            self._evict(short)
        return self.pool.take(count)

    def release(self, pages: I32Array) -> None:
        """Rows or pins give up pages: cached ones become idle, others free."""
        idle = self.pool.release(pages)
        if not idle.size:
            return
        self._clock += 1
        self._last_use[idle] = self._clock
        for page in idle[self._children[idle] == 0].tolist():
            heapq.heappush(self._leaves, (self._clock, page, self._births[page]))
        if len(self._leaves) > 2 * len(self._nodes) + _COMPACT_SLACK:
            self._compact()

    def flush(self) -> int:
        """Evict everything that nobody uses; returns the number of pages."""
        count = self.pool.idle
        self._evict(count)
        return count

    def _evict(self, count: int) -> None:
        users, children, births, last_use = self.pool.users, self._children, self._births, self._last_use
        gone: list[int] = []
        while len(gone) < count:
            if not self._leaves:
                raise PageError(f"{count} pages to evict, found {len(gone)} idle leaves")
            used, page, birth = heapq.heappop(self._leaves)
            if births[page] != birth or last_use[page] != used or users[page] or children[page]:
                continue
            self._remove(page)
            gone.append(page)
        self.evictions += count
        self.pool.reclaim(np.array(gone, np.int32))

    def _remove(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._nodes[key]
        self._keys[page] = None
        self._births[page] = 0
        parent = key[0]
        if isinstance(parent, str):
            return
        self._children[parent] -= 1
        if not self._children[parent] and not self.pool.users[parent]:
            heapq.heappush(self._leaves, (int(self._last_use[parent]), parent, self._births[parent]))

    def _compact(self) -> None:
        idle = np.flatnonzero(self.pool.cached & (self.pool.users == 0) & (self._children == 0))
        self._leaves = [(int(self._last_use[page]), page, self._births[page]) for page in idle.tolist()]
        heapq.heapify(self._leaves)

    def check(self) -> None:
        """Raise PageError unless the tree agrees with itself and the pool. O(pages), for tests."""
        self.pool.check()
        children = np.zeros_like(self._children)
        users = self.pool.users
        for (parent, _ids), page in self._nodes.items():
            if not self.pool.cached[page] or not self._births[page]:
                raise PageError(f"node {page} is not marked as cached")
            if isinstance(parent, str):
                continue
            children[parent] += 1
            if not self._births[parent] or self._births[parent] > self._births[page]:
                raise PageError(f"node {page} hangs below {parent}, which is not in the tree")
            if users[page] and not users[parent]:
                raise PageError(f"node {page} is used but its parent {parent} is not")
        if not np.array_equal(children, self._children):
            raise PageError("children are miscounted")
        if int(np.count_nonzero(self.pool.cached)) != len(self._nodes):
            raise PageError("a cached page is not in the tree")
