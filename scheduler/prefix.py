"""The prefix tree: full pages of known ids, shared between requests of equal salt.

A node is a run of pages, an edge the ids of them; children differ in their first page. The salt is part of the
edges at the root. Nodes are split where requests diverge, so whoever uses a page of a node uses all of it, and its
whole path: an idle node has idle descendants only, and evicting idle leaves, oldest first, reaches every idle page.
After RadixAttention (Zheng et al. 2024), with pages for tokens.
"""

import heapq
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from proto.messages import ID_BYTES, column
from scheduler.pages import PageError, PagePool

_COMPACT_SLACK = 1024
_BATCH_PART = 256  # of the pool, evicted at once: the few cached pages that go early cost less than a call for each


class Node(msgspec.Struct, eq=False):
    """Pages start..end of all paths through it. When it is split, the node keeps the lower part."""

    parent: "Node | None"  # None: the root
    key: bytes  # among the parent's children
    ids: bytes
    pages: bytes
    start: int
    end: int
    users: int  # rows and pins
    last_use: int
    alive: bool = True  # in the tree
    children: "dict[bytes, Node]" = {}


class Path:
    """A way down the tree, kept between visits: the nodes that hold a request's first `length` pages.

    They may be evicted, and the tip may grow, as long as nobody holds the path: `match` puts that right.
    """

    __slots__ = ("detached", "first_key", "length", "salt", "tip")

    def __init__(self, salt: str) -> None:
        self.salt = salt.encode()
        self.first_key = b""  # at the root; kept, and its hash with it
        self.tip: Node | None = None  # None: not looked up yet
        self.length = 0
        self.detached = False  # the row computes a page that the tree has from another: it adds nothing more

    def __len__(self) -> int:
        return self.length

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes of the path, from the tip up."""
        node = self.tip
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    @property
    def pages(self) -> bytes:
        tip = self.tip
        if tip is None:
            return b""
        return tip.pages if not tip.start else b"".join([node.pages for node in self.nodes][::-1])

    @property
    def idle_pages(self) -> int:
        """Number of its pages that nobody uses."""
        idle, node = 0, self.tip
        while node is not None and node.parent is not None and not node.users:
            idle += node.end - node.start
            node = node.parent
        return idle

    @property
    def own_pages(self) -> int:
        """Number of its pages that only the row which holds it uses."""
        own = 0
        for node in self.nodes:
            if node.users > 1:
                break
            own += node.end - node.start
        return own


class PrefixTree:
    """Matches, inserts and evicts pages of one pool. With `enabled` false it stays empty."""

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.evictions = 0
        self.cached = 0  # pages in the tree
        self._enabled = enabled
        self._page_bytes = pool.page_size * ID_BYTES
        self._root = Node(None, b"", b"", b"", 0, 0, 0, 0)
        self._clock = 0
        self._entries = 0
        self._batch = pool.num_pages // _BATCH_PART
        # Idle leaves with their last use, oldest first, and as a heap (with the number of the entry) those that an
        # eviction laid bare. Entries go stale and are skipped when taken.
        self._leaves: deque[tuple[int, Node]] = deque()
        self._bared: list[tuple[int, int, Node]] = []

    def match(self, path: Path, ids: bytes, tokens: int) -> None:
        """Make `path` the longest cached path over whole pages of the first `tokens` ids.

        Resumes from where the path still stands, so that a second look costs O(what changed).
        """
        node, length = path.tip or self._root, path.length
        limit = tokens // self.pool.page_size
        sure = limit
        # Up to where nothing happened: a node may have grown since, or its parent after the node was evicted. What
        # a node had when the path or its child reached its end, it still has.
        while length and (length > sure or not node.alive or node.end != length):
            sure, length = min(sure, length), node.start
            assert node.parent is not None
            node = node.parent
        if node.children and node.end < limit:
            node = self._descend(node, path, ids, limit)
        path.tip = node
        path.length = node.end
        path.detached = False

    def extend(self, path: Path, ids: bytes, table: bytes, end: int) -> None:
        """Insert pages of a running row (from its page table), from the path's tip up to page number `end`.

        Where the tree has an equal page already, the row stops: it does not use that page, so what it adds below
        could outlive its parent.
        """
        if path.length >= end or path.detached or not self._enabled:
            return
        tip = path.tip or self._root
        if tip.children and self._key(tip, path, ids) in tip.children:
            path.detached = True
            return
        path.tip = self._add(tip, path, ids, table, end, 1)
        path.length = end

    def known_below(self, path: Path, ids: bytes, end: int) -> bytes:
        """Return the cached pages that continue a path by these ids, up to page number `end`."""
        tip = path.tip or self._root
        node, found = self._descend(tip, path, ids, end), []
        while node is not tip:
            found.append(node.pages)
            assert node.parent is not None
            node = node.parent
        return b"".join(found[::-1])

    def hold(self, path: Path) -> bytes:
        """Use the pages of a path that was just matched, until `release_row` or `unpin`; returns them.

        Raises PageError when its tip has changed since.
        """
        if path.tip is not None and (path.tip.end != path.length or not path.tip.alive):
            raise PageError("a path was held without being matched again after the tree had changed")
        for node in path.nodes:
            if not node.users:
                self.pool.idle -= node.end - node.start
            node.users += 1
        return path.pages

    def release_row(self, path: Path, table: bytes, ids: bytes = b"", end: int = 0) -> None:
        """Release a row's path and the other pages of its page table.

        Its pages up to number `end`, of these `ids`, enter the tree, where it has no equal ones; others are free.
        """
        self._clock += 1
        length = path.length
        if end > length and self._enabled:
            tip = path.tip or self._root
            node = self._descend(tip, path, ids, end) if tip.children else tip
            if node.end < end:
                self._add(node, path, ids, table, end, 0)
            if node is not tip:
                # What the tree has from another.
                self.pool.release(table[length * ID_BYTES : node.end * ID_BYTES])
            length = end
        self.pool.release(table[length * ID_BYTES :])
        self._release(path)

    def unpin(self, path: Path) -> None:
        self._clock += 1
        self._release(path)

    def forget(self, path: Path) -> None:
        """Remove the pages that only this path's row uses from the tree: their content cannot be trusted."""
        node = path.tip or self._root
        while node.parent is not None and node.users == 1 and not node.children:
            node = self._remove(node)
        path.tip, path.length = node, node.end
        path.detached = True

    def allocate(self, count: int) -> bytes:
        """Allocate pages for a row, evicting idle ones when too few are free. Raises PageError beyond `available`."""
        pool = self.pool
        short = count - pool.free
        if short > 0:
            self._evict(max(short, min(pool.idle, self._batch)))
        return pool.pop(count)

    def flush(self) -> int:
        """Evict everything that nobody uses; returns the number of pages."""
        count = self.pool.idle
        self._evict(count)
        return count

    # ---------------------------------------------------------------- nodes

    def _key(self, node: Node, path: Path, ids: bytes) -> bytes:
        """Return the key of the child of `node` that continues with these ids, at least one page of which follow."""
        at = node.end * self._page_bytes
        if at:
            return ids[at : at + self._page_bytes]
        key = path.first_key
        if not key:
            key = path.first_key = path.salt + ids[: self._page_bytes]
        return key

    def _descend(self, node: Node, path: Path, ids: bytes, limit: int) -> Node:
        """Return the node below this one that ends where tree and ids part, at page number `limit` at the latest."""
        size = self._page_bytes
        while node.end < limit:
            child = node.children.get(self._key(node, path, ids))
            if child is None:
                break
            end = min(child.end, limit)
            run = ids[child.start * size : end * size]
            if run == child.ids:
                node = child
                continue
            differ = np.flatnonzero(column(run) != column(child.ids)[: len(run) // ID_BYTES])
            return self._split(child, child.start + int(differ[0]) // self.pool.page_size if differ.size else end)
        return node

    def _add(self, node: Node, path: Path, ids: bytes, table: bytes, end: int, users: int) -> Node:
        """Extend a node by pages of a row's table up to `end`; returns the node that has them."""
        size, start = self._page_bytes, node.end
        run = ids[start * size : end * size]
        pages = table[start * ID_BYTES : end * ID_BYTES]
        self.cached += end - start
        if node is path.tip and node.users == 1 and not node.children:
            # Nobody else has it: it grows.
            node.ids += run
            node.pages += pages
            node.end = end
            return node
        key = self._key(node, path, ids)
        child = node.children[key] = Node(node, key, run, pages, start, end, users, self._clock)
        if not users:
            self.pool.idle += end - start
            self._note_leaf(child)
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two before page number `at`; returns the new upper one."""
        parent, count = node.parent, at - node.start
        assert parent is not None
        cut = count * self._page_bytes
        upper = Node(
            parent,
            node.key,
            node.ids[:cut],
            node.pages[: count * ID_BYTES],
            node.start,
            at,
            node.users,
            node.last_use,
        )
        parent.children[upper.key] = upper
        node.parent, node.start = upper, at
        node.ids, node.pages = node.ids[cut:], node.pages[count * ID_BYTES :]
        node.key = node.ids[: self._page_bytes]
        upper.children[node.key] = node
        return upper

    def _release(self, path: Path) -> None:
        """Remove one user from each node of a path."""
        tip = node = path.tip or self._root
        while node.parent is not None:
            node.users -= 1
            if node.users <= 0:
                if node.users:
                    raise PageError(f"pages {column(node.pages).tolist()} released twice")
                node.last_use = self._clock
                self.pool.idle += node.end - node.start
            node = node.parent
        if not (tip.users or tip.children) and tip.parent is not None:
            self._note_leaf(tip)

    def _note_leaf(self, node: Node) -> None:
        """Record an idle leaf that was last used just now."""
        leaves = self._leaves
        leaves.append((node.last_use, node))
        if len(leaves) > 2 * self.cached + _COMPACT_SLACK:
            self._leaves = deque(entry for entry in leaves if self._is_idle_leaf(entry[1], entry[0]))

    @staticmethod
    def _is_idle_leaf(node: Node, last_use: int) -> bool:
        """Return whether an entry is still valid."""
        return node.alive and not node.users and not node.children and node.last_use == last_use

    def _oldest_leaf(self) -> Node | None:
        """Remove the least recently used idle leaf from the lists and return it."""
        leaves, bared = self._leaves, self._bared
        while leaves or bared:
            if bared and (not leaves or bared[0][0] <= leaves[0][0]):
                last_use, _, node = heapq.heappop(bared)
            else:
                last_use, node = leaves.popleft()
            if node.last_use == last_use and node.alive and not (node.users or node.children):
                return node
        return None

    def _evict(self, count: int) -> None:
        """Free at least `count` idle pages: whole leaves, unless they are longer than a batch."""
        left = count
        gone: list[bytes] = []
        while left > 0:
            node = self._oldest_leaf()
            if node is None:
                raise PageError(f"{count} pages to evict, found {count - left} in idle leaves")
            length = node.end - node.start
            if length > left and length > self._batch:
                self._split(node, node.end - left)
                length = left
            gone.append(node.pages)
            left -= length
            parent = self._remove(node)
            if not (parent.children or parent.users) and parent.parent is not None:
                self._entries += 1
                heapq.heappush(self._bared, (parent.last_use, self._entries, parent))
        self.evictions += count - left
        self.pool.idle -= count - left
        self.pool.release(b"".join(gone))

    def _remove(self, node: Node) -> Node:
        """Remove a leaf from the tree and return its parent. Its pages are left to the caller."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.alive = False
        self.cached -= node.end - node.start
        return parent

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before their children. For tests."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def check(self, own: bytes) -> None:
        """Raise PageError unless the tree agrees with itself and the pool, given the rows' own pages. For tests."""
        nodes = list(self.nodes())
        self.pool.check(own + b"".join(node.pages for node in nodes))
        idle = sum(node.end - node.start for node in nodes if not node.users)
        if idle != self.pool.idle:
            raise PageError(f"{idle} idle pages, counted {self.pool.idle}")
        cached = sum(node.end - node.start for node in nodes)
        if cached != self.cached:
            raise PageError(f"{cached} cached pages, counted {self.cached}")
        entries = [*self._leaves, *((last_use, node) for last_use, _, node in self._bared)]
        entered = {id(node) for last_use, node in entries if self._is_idle_leaf(node, last_use)}
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if (
                parent.children.get(node.key) is not node
                or node.key[-self._page_bytes :] != node.ids[: self._page_bytes]
            ):
                raise PageError("a node is not found by its ids")
            if not node.alive or node.start != parent.end or node.end <= node.start:
                raise PageError("a node does not continue its parent")
            if len(node.ids) != (node.end - node.start) * self._page_bytes:
                raise PageError("a node has more or fewer ids than its pages hold")
            if parent.parent is not None and node.users > parent.users:
                raise PageError("a node has more users than its parent")
            if not node.users and not node.children and id(node) not in entered:
                raise PageError("an idle leaf would never be evicted")
