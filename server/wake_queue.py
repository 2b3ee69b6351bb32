"""Wakes waiting handlers a few at a time, so that an event loop with thousands of them gets other work done too."""

import asyncio
import time
from collections import deque

# Per pass of the event loop. A handler costs about a tenth of a millisecond; a health probe, as any call, needs some
# ten passes.
_HANDLERS_PER_PASS = 8
# While there is more to do, the loop's thread sleeps a moment now and then. grpc's own threads read the sockets; the
# kernel lets them wait for tens of milliseconds behind a thread that never sleeps, on a machine with few CPUs.
_BUSY_SECONDS = 0.001
_NAP_SECONDS = 0.00005


class WakeQueue:
    """Handlers that are ready to go on, first come first served."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Future[None]] = deque()
        self._napped = 0.0

    def waiter(self) -> "Waiter":
        """Make what one handler waits with."""
        return Waiter(self)

    def add(self, future: "asyncio.Future[None]") -> None:
        """Complete a future when its turn comes."""
        if not self._ready:
            self._loop.call_soon(self._wake_some)
        self._ready.append(future)

    def _wake_some(self) -> None:
        for _ in range(min(len(self._ready), _HANDLERS_PER_PASS)):
            future = self._ready.popleft()
            if not future.done():  # otherwise its handler was cancelled
                future.set_result(None)
        if self._ready:
            self._loop.call_soon(self._wake_some)
            if time.monotonic() - self._napped > _BUSY_SECONDS:
                time.sleep(_NAP_SECONDS)
                self._napped = time.monotonic()


class Waiter:
    """Suspends one handler."""

    def __init__(self, queue: WakeQueue) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None  # while it waits to be notified

    async def wait_notified(self) -> None:
        """Wait until `notify` is called, and then for the queue."""
        self._future = self._loop.create_future()
        await self._future

    def notify(self) -> None:
        """Have the handler woken, if it waits."""
        future, self._future = self._future, None
        if future is not None:
            self._queue.add(future)

    async def wait_turn(self) -> None:
        """Wait for the queue only."""
        future = self._loop.create_future()
        self._queue.add(future)
        await future
