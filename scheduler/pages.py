"""The pool of KV pages: who uses each page, and which are free.

A page is *free* (on the stack), *used* (by at least one row or pin), or *idle* (used by nobody, but its
content stands in the prefix tree). Owner: the prefix tree, which alone turns idle pages into free ones.
"""

import numpy as np
import numpy.typing as npt

I32Array = npt.NDArray[np.int32]


class PageError(RuntimeError):
    """The page accounting is broken: a bug, never an input."""


class PagePool:
    """Reference counts and the free stack, as columns over page ids 0..num_pages-1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.users = np.zeros(num_pages, np.int32)  # rows and pins that hold the page
        self.free = num_pages
        self.idle = 0
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # [:free] are the free pages

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free ones, and idle ones by eviction."""
        return self.free + self.idle

    @property
    def used(self) -> int:
        return self.num_pages - self.free - self.idle

    def pages_of(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> I32Array:
        """Pop free pages, each with one user. Raises PageError when there are not enough."""
        if count > self.free:
            raise PageError(f"{count} pages wanted, {self.free} free")
        pages: I32Array = self._stack[self.free - count : self.free].copy()
        self.free -= count
        self.users[pages] = 1
        return pages

    def retain(self, pages: I32Array) -> None:
        """One more user for each of these distinct used or idle pages."""
        users = self.users[pages]
        self.idle -= int(np.count_nonzero(users == 0))
        self.users[pages] = users + 1

    def release(self, pages: I32Array, distinct: bool) -> list[int]:
        """One user less for each page; unless `distinct`, a page may come more than once, from several rows.

        Returns the distinct pages that nobody uses any more; the caller says which of them are idle and which
        free. Raises PageError when a page had no user left to give up.
        """
        if distinct:
            left = self.users[pages] - 1
            self.users[pages] = left
        else:
            np.subtract.at(self.users, pages, 1)
            left = self.users[pages]
        if left.size and left.min() < 0:
            raise PageError(f"pages {pages[left < 0].tolist()} released twice")
        unused: list[int] = pages[left == 0].tolist()
        # A page that comes several times is unused each time.
        return unused if distinct else list(dict.fromkeys(unused))

    def push(self, pages: list[int]) -> None:
        """These unused pages become free."""
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)

    def check(self, cached: list[int]) -> None:
        """Raise PageError unless every page is in exactly one state, given the pages that are cached.

        O(pages), for tests.
        """
        free = self._stack[: self.free]
        if np.unique(free).size != free.size:
            raise PageError("a page is free twice")
        if self.users[free].any() or set(free.tolist()) & set(cached):
            raise PageError("a free page is used or cached")
        if self.users.min() < 0:
            raise PageError("a page has negative users")
        idle = int(np.count_nonzero(self.users[cached] == 0))
        if idle != self.idle:
            raise PageError(f"{idle} idle pages, counted {self.idle}")
        used = int(np.count_nonzero(self.users))
        if used != self.used:
            raise PageError(f"{used} used pages, counted {self.used}: a page leaked")
