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
_EVICTED_PART = 256  # of the pool, evicted at once

Key = tuple[int | str, bytes]  # (parent page, or the salt at the root; ids of the page)


class Path:
    """A way down the tree, kept between visits: the nodes that hold a request's first pages.

    A node that was evicted since is noticed by its key, and then everything below it is gone too.
    """

    __slots__ = ("keys", "pages", "salt", "severed")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.pages: list[int] = []
        self.keys: list[Key] = []  # of the nodes: the tree's own objects, so identity tells if a node still stands
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
        # Lists, since these are read page by page, where numpy's scalars are slow.
        self._children = [0] * pool.num_pages
        self._last_use = [0] * pool.num_pages
        self._clock = 0
        # Evicting one page at a time costs more than the few cached pages that a batch gives up early.
        self._eviction_batch = pool.num_pages // _EVICTED_PART
        # (last use, page) of idle leaves; entries go stale and are skipped when popped.
        self._leaves: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, path: Path, ids: bytes, tokens: int) -> None:
        """Make `path` the longest cached one of whole pages of the first `tokens` ids.

        Resumes from where the path still stands, so that a second look costs O(what changed).
        """
        pages, keys = path.pages, path.keys
        end = tokens // self.pool.page_size
        while pages and (len(pages) > end or self._keys[pages[-1]] is not keys[-1]):
            pages.pop()
            keys.pop()
        path.severed = False
        size, nodes, parent = self._page_bytes, self._nodes, path.tip
        for at in range(len(pages) * size, end * size, size):
            page = nodes.get((parent, ids[at : at + size]))
            if page is None:
                return
            key = self._keys[page]
            assert key is not None
            pages.append(page)
            keys.append(key)
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
        first = len(path.pages)
        if first >= end:
            return
        size, nodes, all_keys, children, parent = (
            self._page_bytes,
            self._nodes,
            self._keys,
            self._children,
            path.tip,
        )
        for number, own in enumerate(table[first:end].tolist(), first):
            key: Key = (parent, ids[number * size : (number + 1) * size])
            page = nodes.setdefault(key, own)
            if page == own:
                all_keys[own] = key
                if number:
                    children[parent] += 1  # type: ignore[index]
            elif leaving:
                key = all_keys[page]  # type: ignore[assignment]
            else:
                path.severed = True
                return
            path.pages.append(page)
            path.keys.append(key)
            parent = page

    def forget(self, path: Path) -> None:
        """Take the pages that only this path's row uses out of the tree: their content is not to be trusted."""
        while path.pages and not self._children[path.pages[-1]] and self.pool.users[path.pages[-1]] == 1:
            page = path.pages.pop()
            path.keys.pop()
            self._remove(page)
        path.severed = True

    def pin(self, path: Path) -> None:
        """Hold a matched path against eviction until `unpin`."""
        self.pool.retain(np.array(path.pages, np.int32))

    def unpin(self, path: Path) -> None:
        self.release(np.array(path.pages, np.int32))

    def allocate(self, count: int) -> I32Array:
        """Pages with one user each; evicts idle ones when too few are free. Raises PageError beyond `available`."""
        pool = self.pool
        short = count - pool.free
        if short > 0:
            self._evict(max(short, min(pool.idle, self._eviction_batch)))
        return pool.take(count)

    def release(self, pages: I32Array, distinct: bool = True) -> None:
        """Rows or pins give up pages: cached ones become idle, others free. See `PagePool.release`."""
        unused = self.pool.release(pages, distinct)
        self._clock = clock = self._clock + 1
        last_use, children, keys = self._last_use, self._children, self._keys
        free: list[int] = []
        for page in unused:
            if keys[page] is None:
                free.append(page)
                continue
            last_use[page] = clock
            if not children[page]:
                heapq.heappush(self._leaves, (clock, page))
        self.pool.idle += len(unused) - len(free)
        self.pool.push(free)
        if len(self._leaves) > 2 * len(self._nodes) + _COMPACT_SLACK:
            self._compact()

    def flush(self) -> int:
        """Evict everything that nobody uses; returns the number of pages."""
        count = self.pool.idle
        self._evict(count)
        return count

    def _evict(self, count: int) -> None:
        users, children, keys, last_use, leaves = (
            self.pool.users,
            self._children,
            self._keys,
            self._last_use,
            self._leaves,
        )
        gone: list[int] = []
        while len(gone) < count:
            if not leaves:
                raise PageError(f"{count} pages to evict, found {len(gone)} idle leaves")
            used, page = heapq.heappop(leaves)
            if keys[page] is None or last_use[page] != used or users[page] or children[page]:
                continue
            # Up the path for as long as the parent is the next to go anyway: most of a path is of one age.
            while True:
                parent = self._remove(page)
                gone.append(page)
                if parent is None or children[parent] or users[parent]:
                    break
                entry = (last_use[parent], parent)
                if len(gone) == count or (leaves and leaves[0] < entry):
                    heapq.heappush(leaves, entry)
                    break
                page = parent
        self.evictions += count
        self.pool.idle -= count
        self.pool.push(gone)

    def _remove(self, page: int) -> int | None:
        """Take a leaf out of the tree; returns its parent, unless that is a root."""
        key = self._keys[page]
        assert key is not None
        del self._nodes[key]
        self._keys[page] = None
        parent = key[0]
        if isinstance(parent, str):
            return None
        self._children[parent] -= 1
        return parent

    def _compact(self) -> None:
        unused = np.flatnonzero(self.pool.users == 0).tolist()
        self._leaves = [
            (self._last_use[page], page) for page in unused if self._keys[page] is not None and not self._children[page]
        ]
        heapq.heapify(self._leaves)

    def check(self) -> None:
        """Raise PageError unless the tree agrees with itself and the pool. O(pages), for tests."""
        self.pool.check(list(self._nodes.values()))
        children = [0] * len(self._children)
        users = self.pool.users
        for key, page in self._nodes.items():
            parent = key[0]
            if self._keys[page] != key:
                raise PageError(f"node {page} does not know its key")
            if isinstance(parent, str):
                continue
            children[parent] += 1
            if self._keys[parent] is None:
                raise PageError(f"node {page} hangs below {parent}, which is not in the tree")
            if users[page] and not users[parent]:
                raise PageError(f"node {page} is used but its parent {parent} is not")
        if children != self._children:
            raise PageError("children are miscounted")
        if sum(key is not None for key in self._keys) != len(self._nodes):
            raise PageError("a page has a key and is not in the tree")
