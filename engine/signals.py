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
        self._pending: list[int] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _WATCHED:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)

    def fileno(self) -> int:
        return self._reader.fileno()

    def end_requested(self) -> bool:
        """Return whether a signal that ends programs is pending."""
        return any(number != signal.SIGCHLD for number in self._pending)

    def drain(self) -> list[int]:
        """Return the signals since the last call, in order."""
        try:
            while os.read(self._reader.fileno(), 4096):
                pass
        except BlockingIOError:
            pass
        pending, self._pending = self._pending, []
        return pending
