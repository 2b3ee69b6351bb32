"""The thread that sends results, each as soon as the device has it and not before.

It owns its socket, so that no result waits for the thread that launches steps, nor the other way round.
"""

import ctypes
import logging
import os
import queue
import threading
import time

from engine.runtime.stage import INTERNAL_ERROR, ExitCode
from proto.channel import Context, Outbox
from proto.ids import Address
from worker.device import Completion, Deferred

log = logging.getLogger(__name__)

_PR_SET_TIMERSLACK = 29
_RETRY_SECONDS = 0.001  # between attempts to hand over a backlog
# A sleep ends late by about this much, so the rest is spent in short yields.
_SPIN_NS = 60_000


class OutputThread:
    """Sends completions in the order of `put`. Its Python stays small: it takes the GIL from the launching thread."""

    def __init__(self, run_dir: str, sender: Address, incarnation: int, to: Address) -> None:
        self._context = Context()
        self._outbox = Outbox(self._context, run_dir, sender, incarnation, to)
        self._queue: queue.SimpleQueue[Completion | Deferred | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def put(self, completion: Completion | Deferred) -> None:
        """Send a message at its time, or once the device has it. Due times never decrease."""
        self._queue.put(completion)

    def aim(self, incarnation: int) -> None:
        """Address this incarnation of the scheduler from now on."""
        self._outbox.address_incarnation(incarnation)

    def close(self) -> None:
        """Send what was put, then end."""
        self._queue.put(None)
        self._thread.join()
        self._outbox.close()
        self._context.close()

    def _run(self) -> None:
        # Per thread: sleeps otherwise end up to 50 µs late on purpose, to save wake-ups.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        try:
            while (completion := self._next()) is not None:
                if isinstance(completion, Deferred):
                    self._outbox.send(completion.wait())
                else:
                    sleep_until(completion.due)
                    self._outbox.send(completion.message)
        except Exception:
            log.critical(INTERNAL_ERROR, exc_info=True)
            os._exit(ExitCode.BUG)

    def _next(self) -> Completion | Deferred | None:
        while not self._outbox.flush():
            try:
                return self._queue.get(timeout=_RETRY_SECONDS)
            except queue.Empty:
                continue
        return self._queue.get()


def sleep_until(due: int) -> None:
    """Return at monotonic ns `due`, as precisely as the kernel allows without holding the GIL."""
    left = due - time.monotonic_ns()
    if left > _SPIN_NS:
        time.sleep((left - _SPIN_NS) / 1e9)
    while time.monotonic_ns() < due:
        time.sleep(0)
