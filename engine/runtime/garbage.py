"""Garbage collection in stages whose code makes no reference cycles."""

import gc

_THRESHOLD = 100_000


def tame_gc() -> None:
    """Let the collector look seldom, and never at what was imported. Called once a stage has what it keeps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
