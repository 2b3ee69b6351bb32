"""Thousands of handlers on one loop: few of them work in each of its turns, so that others' work comes between."""

import asyncio
import time
from collections import deque

# Each costs about a tenth of a millisecond. A health probe, as any call, needs some ten turns of the loop.
_HANDLERS_A_TURN = 8
# While there is more to do, the loop's thread sleeps a moment now and then. grpc's own threads read the sockets; the
# kernel lets them wait for tens of milliseconds behind a thread that never sleeps, on a machine with few CPUs.
_BUSY_SECONDS = 0.001
_NAP_SECONDS = 0.00005


class Turns:
    """Who waits for a turn, first come first served."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._napped = 0.0

    def place(self) -> "Place":
        """For one handler."""
        return Place(self)

    def queue(self, future: "asyncio.Future[None]") -> None:
        """Let it be done in its turn."""
        if not self._waiting:
            self._loop.call_soon(self._let_in)
        self._waiting.append(future)

    def _let_in(self) -> None:
        for _ in range(min(len(self._waiting), _HANDLERS_A_TURN)):
            future = self._waiting.popleft()
            if not future.done():  # otherwise its handler was cancelled
                future.set_result(None)
        if self._waiting:
            self._loop.call_soon(self._let_in)
            if time.monotonic() - self._napped > _BUSY_SECONDS:
                time.sleep(_NAP_SECONDS)
                self._napped = time.monotonic()


class Place:
    """Where one handler waits."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None  # while it waits for news

    async def news(self) -> None:
        """Wait until `tell` was called, and for a turn then."""
        self._future = self._loop.create_future()
        await self._future

    def tell(self) -> None:
        """There is news; nothing happens unless the handler waits for it."""
        future, self._future = self._future, None
        if future is not None:
            self._turns.queue(future)

    async def turn(self) -> None:
        """Wait for a turn."""
        future = self._loop.create_future()
        self._turns.queue(future)
        await future
