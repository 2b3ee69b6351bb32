"""Progress reports of work that takes long."""

import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total), in bytes; total 0 = unknown."""

_LINE_SECONDS = 1.0


def silent(text: str, done: int, total: int) -> None:
    """Progress for callers who do not show any."""


class ProgressLines:
    """Progress as lines: every new text, its numbers once a second, and its end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._text = ""
        self._next = 0.0

    def __call__(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        if text == self._text and now < self._next and done < total:
            return
        self._text, self._next = text, now + _LINE_SECONDS
        amount = f" {done / 1e6:.1f}/{total / 1e6:.1f} MB" if total else ""
        print(f"{text}{amount}", file=self._out, flush=True)
