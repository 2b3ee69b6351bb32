"""How long work tells that it goes on."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total), in bytes; total 0 = unknown."""


def silent(text: str, done: int, total: int) -> None:
    """Progress for callers who do not show any."""
