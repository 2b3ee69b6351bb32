"""The user's cache: files that are slow to get and cheap to lose.

Every file appears under its final name complete or not at all.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.models.errors import ModelError


def cache_dir() -> Path:
    """Return $QUINTET_CACHE, else quintet under $XDG_CACHE_HOME, else ~/.cache/quintet. May not exist yet."""
    if chosen := os.environ.get("QUINTET_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "quintet"


def make_directory(path: Path) -> Path:
    """Create a directory of the cache. Raises ModelError when the system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot create the cache directory {path}: {error.strerror}; set QUINTET_CACHE to a writable one"
        ) from error
    return path


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock among processes; `on_wait` is called once if another one has it."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it appears complete or not at all. Raises ModelError when the system refuses."""
    make_directory(path.parent)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as handle:
            try:
                handle.write(content)
                handle.flush()
                os.replace(handle.name, path)
            except BaseException:
                os.unlink(handle.name)
                raise
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error
