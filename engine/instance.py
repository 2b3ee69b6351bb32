"""An instance as a context manager, for commands that start one of their own and for tests."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self, TypedDict

_LOOK_SECONDS = 0.02
_KEPT_LINES = 60


class InstanceError(RuntimeError):
    """The instance did not start, or did not stop; the text ends with its last lines."""


class StageProcess(TypedDict):
    """One stage's process, as the ready-file lists it."""

    kind: str
    index: int
    rank: int
    name: str  # of its inbox, such as worker-0-1
    pid: int
    title: str


class Instance:
    """A `quintet serve` of our own, on a free port. It ends with the context, or when this process ends."""

    def __init__(self, process: "subprocess.Popen[str]", lifeline: int, lines: deque[str], reader: threading.Thread):
        """Use `start`."""
        self._process = process
        self._lifeline = lifeline
        self._lines = lines
        self._reader = reader
        self.address = ""
        self.run_dir = ""
        self.stages: list[StageProcess] = []

    @classmethod
    def start(cls, args: Sequence[str], timeout: float = 600.0, echo: IO[str] | None = None) -> "Instance":
        """Run `quintet serve` with these flags and wait until it serves.

        `args` must not hold --ready-file. `echo` receives its stderr, line by line, as it comes. Raises
        InstanceError, with its last lines, when it ends or `timeout` seconds pass before that.
        """
        with tempfile.TemporaryDirectory(prefix="quintet-ready-") as folder:
            ready_file = Path(folder) / "ready.json"
            instance = cls._spawn([*args, "--ready-file", str(ready_file)], echo)
            try:
                instance._await(ready_file, timeout)
            except BaseException:
                instance.kill()
                raise
        return instance

    @classmethod
    def _spawn(cls, args: Sequence[str], echo: IO[str] | None) -> "Instance":
        # The supervisor stops when the write end closes, even if this process is killed.
        read_end, lifeline = os.pipe()
        quintet = [sys.executable, "-P", "-m", "engine.cli"]
        command = [*quintet, "serve", "--port", "0", "--parent-fd", str(read_end), *args]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=[read_end],
                start_new_session=True,  # a terminal's ^C is for the command that started us
            )
        finally:
            os.close(read_end)
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        assert process.stderr is not None
        reader = threading.Thread(target=_read, args=(process.stderr, lines, echo), daemon=True)
        reader.start()
        return cls(process, lifeline, lines, reader)

    def _await(self, ready_file: Path, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not ready_file.exists():
            if self._process.poll() is not None:
                self._reader.join(1.0)
                raise InstanceError(
                    f"the instance ended with exit code {self._process.returncode}:\n{self.stderr_tail}"
                )
            if time.monotonic() > end:
                raise InstanceError(f"the instance was not serving after {timeout:g} s:\n{self.stderr_tail}")
            time.sleep(_LOOK_SECONDS)
        facts = json.loads(ready_file.read_text())
        self.address = facts["address"]
        self.run_dir = facts["run_dir"]
        self.stages = facts["stages"]

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def stderr_tail(self) -> str:
        """The last lines of its stderr."""
        return "\n".join(self._lines)

    def wait(self, timeout: float = 60.0) -> int:
        """Exit code of the instance once it has ended by itself. Raises InstanceError after `timeout` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise InstanceError(f"the instance was still running after {timeout:g} s:\n{self.stderr_tail}") from None
        self._reader.join(1.0)
        self._close()
        return code

    def stop(self, timeout: float = 60.0) -> int:
        """Ask it to drain and end (SIGTERM); returns its exit code, 0 when all went well."""
        if self._process.poll() is None:
            self._process.terminate()
        return self.wait(timeout)

    def kill(self) -> None:
        """End it at once, by killing its supervisor."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except InstanceError:
            self.kill()
            raise


def _read(stream: IO[str], lines: deque[str], echo: IO[str] | None) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))
        if echo is not None:
            echo.write(line)
            echo.flush()
