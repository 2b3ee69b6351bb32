"""The pipe between grpc's poller thread and the loop does not fill up."""

import socket
import subprocess
import sys

from server.poller import draining_socket_pairs


def test_one_read_takes_all_wake_ups() -> None:
    with draining_socket_pairs():
        reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        for _ in range(100):
            writer.send(b"1")
        assert len(reader.recv(1)) == 100
    assert socket.socketpair()[0].__class__ is socket.socket


_PROBE = """
import asyncio, gc, grpc, socket
from server.poller import _DrainedSocket, draining_socket_pairs

async def main():
    with draining_socket_pairs():
        grpc.aio.init_grpc_aio()
    grpc.aio.server()
    print(sum(isinstance(thing, _DrainedSocket) for thing in gc.get_objects()))

asyncio.run(main())
"""


def test_grpc_takes_its_pair_from_there() -> None:
    """Should grpc change how it makes the pair, this tells that the workaround has no effect any more."""
    result = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) >= 1
