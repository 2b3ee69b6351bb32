"""Works around a congested pipe between grpc.aio's poller thread and asyncio's loop.

The poller writes one byte to a socket pair for each event; the loop, woken, handles every event that is there and
reads one byte. Under load bytes pile up until the pair is full (about 280 of them) and the poller blocks: from
then on grpc gets one event through for each turn of the loop, and calls wait for hundreds of milliseconds beside an
idle loop. A socket that gives all its bytes to whoever asks for one ends that. Found with grpcio 1.85; where the
library makes its pair otherwise, this does nothing.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ALL = 1 << 16


class _DrainedSocket(socket.socket):
    """Reads all that there is, whatever size is asked for."""

    def recv(self, _size: int, flags: int = 0) -> bytes:
        return super().recv(_ALL, flags)


@contextmanager
def draining_socket_pairs() -> Iterator[None]:
    """Make every new socket pair of sockets that drain. Start grpc.aio inside, and nothing else."""
    original = socket.socketpair

    def socketpair(*args: Any, **kwargs: Any) -> tuple[socket.socket, socket.socket]:
        ends = original(*args, **kwargs)
        return _DrainedSocket(fileno=ends[0].detach()), _DrainedSocket(fileno=ends[1].detach())

    socket.socketpair = socketpair
    try:
        yield
    finally:
        socket.socketpair = original
