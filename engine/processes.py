"""Child processes: start one that dies with us, read its output, read its state from /proc, kill it."""

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence

from engine.runtime.death import ask_for_death_signal
from engine.stages import Vitals

_KEPT_LINES = 40
_READ_BYTES = 1 << 16
_LONGEST_LINE = 4096
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DeathPipe:
    """A pipe that is never written to: when it closes, the kernel kills the stages, since the supervisor is gone."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Kill every stage that is tied to the pipe."""
        os.close(self.read_fd)
        os.close(self._write_fd)


class Process:
    """One child, in a session of its own, with stdout and stderr captured in one pipe."""

    def __init__(self, command: Sequence[str], death_fd: int) -> None:
        """Raises OSError when the command cannot be started."""
        parent = os.getpid()

        def tie() -> None:
            # For the time until the stage ties itself to the pipe, and for a wrapper, which never does.
            ask_for_death_signal()
            if os.getppid() != parent:
                os._exit(1)

        self.output_fd, write_fd = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
                pass_fds=[death_fd],
                preexec_fn=tie,  # safe: this process has one Python thread
            )
        except OSError:
            os.close(self.output_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(self.output_fd, False)
        self.pid = self._popen.pid
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = b""

    def reap(self) -> bool:
        """Return whether the child has ended; `status` is then known."""
        return self._popen.poll() is not None

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal that killed it."""
        return self._popen.returncode

    def read_lines(self) -> list[str] | None:
        """Return the whole lines that the child wrote since the last call; None at the end of its output."""
        try:
            data = os.read(self.output_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        return self._keep(lines)

    def read_rest(self) -> list[str]:
        """Return what is left in the pipe after the child's end, including an unfinished last line."""
        lines = []
        while more := self.read_lines():
            lines += more
        last, self._partial = self._partial, b""
        return lines + self._keep([last] if last else [])

    def _keep(self, lines: Sequence[bytes]) -> list[str]:
        texts = [line.decode(errors="replace") for line in lines]
        self.last_lines.extend(texts)
        return texts

    def kill(self, stage_pid: int) -> None:
        """Send SIGKILL to the whole group, and to the stage in case its wrapper moved it to another one."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if stage_pid != self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stage_pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.output_fd)


def read_vitals(pid: int) -> Vitals | None:
    """Read /proc/PID/stat (proc_pid_stat(5)); None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; fields after it are counted from "state".
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Vitals(fields[0].decode(), ticks / _TICKS, int(fields[21]) * _PAGE)
