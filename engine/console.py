"""The supervisor's way to the operator: never waits for a terminal or pipe that nobody reads."""

import os
import select
import sys

# A pipe that polls writable takes this much without blocking (pipe(7), PIPE_BUF).
_PIECE = 4096


class Console:
    """Lines to stderr. Those that it does not take are counted, and the count is told when it does again."""

    def __init__(self) -> None:
        self._missed = 0
        self._fd = sys.stderr.fileno()

    def say(self, text: str) -> None:
        """A message of the supervisor's own."""
        for line in text.splitlines():
            self.forward(f"supervisor: {line}")

    def forward(self, line: str) -> None:
        """A line as a stage wrote it."""
        if self._missed and self._write(f"supervisor: {self._missed} lines were not shown: stderr was not read\n"):
            self._missed = 0
        if not self._write(line + "\n"):
            self._missed += 1

    def _write(self, text: str) -> bool:
        data = text.encode(errors="replace")
        try:
            for start in range(0, len(data), _PIECE):
                if not select.select([], [self._fd], [], 0)[1]:
                    return False
                os.write(self._fd, data[start : start + _PIECE])
        except OSError:  # nobody holds the other end any more: supervising goes on
            return False
        return True
