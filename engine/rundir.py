"""The run directory of an instance: new, private, short. One that was left behind is removed by the next start."""

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from proto.channel import MAX_IPC_PATH

_PREFIX = "quintet-"
_LOCK = "instance.lock"
# What a run directory and the longest inbox name add to their parent's path.
_LONGEST_NAME = f"/{_PREFIX}xxxxxxxx/detokenizer-255"


class RunDirError(RuntimeError):
    """No run directory could be made; the text names the flag and what is wrong."""


class RunDir:
    """A fresh 0700 directory, held by flock for as long as this process lives."""

    def __init__(self, parent: str | None) -> None:
        """`parent` is --run-dir: where instances have their directories; None = the first usable temporary directory.

        Directories there that no process holds are removed first. Raises RunDirError.
        """
        base = _checked(Path(parent).absolute()) if parent else _usual_place()
        try:
            _sweep(base)
            # A sweeper must never see it unlocked, so it gets its name last.
            fresh = tempfile.mkdtemp(prefix="." + _PREFIX, dir=base)
            self._lock = os.open(Path(fresh) / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = str(base / Path(fresh).name[1:])
            os.rename(fresh, self.path)
        except OSError as error:
            raise RunDirError(f"--run-dir {base}: {error.strerror}") from error

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _usual_place() -> Path:
    """Return the first usable one of the session's, the configured and the system's temporary directory."""
    refusals = []
    for place in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if place:
            try:
                return _checked(Path(place).absolute())
            except RunDirError as error:
                refusals.append(str(error))
    raise RunDirError("; ".join(refusals))


def _checked(base: Path) -> Path:
    size = len(os.fsencode(base)) + len(_LONGEST_NAME)
    if size > MAX_IPC_PATH:
        raise RunDirError(
            f"--run-dir {base}: inbox paths in it would have {size} bytes; ipc sockets take at most {MAX_IPC_PATH}: "
            "choose a shorter one"
        )
    if not base.is_dir():
        raise RunDirError(f"--run-dir {base}: no such directory")
    if not os.access(base, os.W_OK | os.X_OK):
        raise RunDirError(f"--run-dir {base}: not writable")
    return base


def _sweep(base: Path) -> None:
    """Remove run directories that no process holds: by flock, since a pid may belong to another process by now."""
    for path in base.glob(_PREFIX + "*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone by now, or never a run directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its instance is running
        finally:
            os.close(lock)
