"""Signals as events for a selector loop."""

import os
import signal
import socket
from types import FrameType

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Signals:
    """Collects SIGTERM, SIGINT, SIGHUP and SIGCHLD; `fileno` becomes readable with each."""

    def __init__(self) -> None:
        """Call in the main thread."""
        self._taken: list[int] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _WATCHED:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._taken.append(number)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ask_to_end(self) -> bool:
        """Whether one that ends programs has come and was not taken yet."""
        return any(number != signal.SIGCHLD for number in self._taken)

    def take(self) -> list[int]:
        """The signals since the last call, in order."""
        try:
            while os.read(self._reader.fileno(), 4096):
                pass
        except BlockingIOError:
            pass
        taken, self._taken = self._taken, []
        return taken
