"""The supervisor's output to stderr, which never waits for a terminal or pipe that nobody reads."""

import os
import select
import sys
import time
from collections import deque

# A pipe that polls writable takes this much without blocking (pipe(7), PIPE_BUF).
_PIECE = 4096
_HELD_BYTES = 8 << 20
_LAST_SECONDS = 1.0


class Console:
    """Writes lines to stderr, buffered for a slow reader up to a limit; lines beyond are counted and reported."""

    def __init__(self) -> None:
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._missed = 0
        self._fd = sys.stderr.fileno()

    def say(self, text: str) -> None:
        """Write a message of the supervisor's own."""
        for line in text.splitlines():
            self.forward(f"supervisor: {line}")

    def forward(self, line: str) -> None:
        """Write a line as a stage wrote it."""
        if self._held_bytes >= _HELD_BYTES:
            self._missed += 1
        else:
            if self._missed:
                self._hold(f"supervisor: {self._missed} lines were not shown: stderr was not read")
                self._missed = 0
            self._hold(line)
        self.flush()

    def flush(self) -> bool:
        """Write what stderr takes without waiting; return whether nothing is left."""
        while self._held:
            if not select.select([], [self._fd], [], 0)[1]:
                return False
            piece = self._held.popleft()
            self._held_bytes -= len(piece)
            try:
                os.write(self._fd, piece)
            except OSError:  # the other end is closed: go on supervising
                self._held.clear()
                self._held_bytes = 0
        return True

    def close(self) -> None:
        """Give a slow reader a moment to read the rest."""
        end = time.monotonic() + _LAST_SECONDS
        while not self.flush() and time.monotonic() < end:
            time.sleep(0.01)

    def _hold(self, line: str) -> None:
        data = line.encode(errors="replace") + b"\n"
        for start in range(0, len(data), _PIECE):
            self._held.append(data[start : start + _PIECE])
        self._held_bytes += len(data)
