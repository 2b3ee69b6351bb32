"""The pool of KV pages: which are free, and how many are cached and used by nobody.

A page is *free* (on the stack), *cached* (its content stands in the prefix tree), or a row's *own*. Cached pages
that nobody uses are *idle*: the prefix tree counts them here, and alone turns them into free ones.
Pages travel as bytes (int32), as in the messages: short ones are cut and joined faster than arrays.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from proto.messages import I32, ID_BYTES, column

I32Array = npt.NDArray[np.int32]


def rank_among_equals(values: I32Array) -> I32Array:
    """Return for each element the number of equal ones before it."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    ranks = np.zeros(len(values), np.int32)
    ranks[order] = np.arange(len(values)) - begins.repeat(np.diff(begins, append=len(values)))
    return ranks


class PageError(RuntimeError):
    """The page accounting is broken: a bug, never an input."""


class PagePool:
    """The stack of free pages, with ids 0..num_pages-1. `on_release` is called with pages that become free."""

    def __init__(self, num_pages: int, page_size: int, on_release: Callable[[bytes], None] | None = None) -> None:
        self._on_release = on_release
        self.num_pages = num_pages
        self.page_size = page_size
        self.free = num_pages
        self.idle = 0
        self._stack = bytearray(np.arange(num_pages - 1, -1, -1, dtype=I32).tobytes())

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones, and idle ones by eviction."""
        return self.free + self.idle

    @property
    def used(self) -> int:
        return self.num_pages - self.free - self.idle

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def pop(self, count: int) -> bytes:
        """Pop free pages. Raises PageError when there are not enough."""
        if not count:
            return b""
        if count > self.free:
            raise PageError(f"{count} pages wanted, {self.free} free")
        start = (self.free - count) * ID_BYTES
        pages = bytes(self._stack[start:])
        del self._stack[start:]
        self.free -= count
        return pages

    def release(self, pages: bytes) -> None:
        """Make these pages free. Raises PageError when there are more free pages than pages."""
        self._stack += pages
        self.free = len(self._stack) // ID_BYTES
        if self.free > self.num_pages:
            raise PageError(f"{self.free} of {self.num_pages} pages are free: some were released twice")
        if self._on_release is not None:
            self._on_release(pages)

    def check(self, taken: bytes) -> None:
        """Raise PageError unless every page is either free or exactly once among those taken. O(pages), for tests."""
        seen = np.bincount(column(bytes(self._stack) + taken), minlength=self.num_pages)
        if seen.size > self.num_pages or (seen != 1).any():
            raise PageError(
                f"pages {np.flatnonzero(seen > 1).tolist()} twice, {np.flatnonzero(seen == 0).tolist()} lost"
            )
