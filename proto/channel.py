"""Messages over ZeroMQ: one `Inbox` per process, one `Outbox` to each inbox that it writes to.

No other module imports zmq. Delivery is not guaranteed: a killed receiver loses a contiguous part of each sender's
stream, so correctness rests on positions and attempts in the messages (docs/architecture.md, 'One inbox a process').
"""

import fcntl
import os
import select
import struct
import time
from collections import deque
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
import zmq

from proto.ids import Address, StageKind
from proto.messages import INBOXES, Message, Stop, World

# sun_path holds 108 bytes with its terminator.
MAX_IPC_PATH = 107
_HIGH_WATER_MARK = 1000
_RECONNECT_MS = 10
_LINGER_MS = 500
_CONTROL = (World, Stop)  # read before all else
# As plain ints: pyzmq's enums cost a microsecond each time they are combined.
_EVENTS, _READABLE, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

# Kind, index, rank and incarnation of the sender; incarnation of the addressee (0 = whoever it is).
_HEADER = struct.Struct("<BBBII")


class ChannelError(RuntimeError):
    """An inbox cannot be bound, or a message from a peer with our schema cannot be decoded."""


def inbox_path(run_dir: str, address: Address) -> str:
    """Return the file of an inbox's socket. Raises ChannelError when its name is too long for ipc."""
    path = os.path.join(run_dir, str(address))
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ChannelError(
            f"inbox path {path!r} has {len(os.fsencode(path))} bytes; ipc sockets take at most {MAX_IPC_PATH}: "
            "choose a shorter --run-dir"
        )
    return path


class Context:
    """The process's ZeroMQ context; closing it closes all its sockets."""

    def __init__(self) -> None:
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        return socket

    def close(self, linger: int = _LINGER_MS) -> None:
        """Send what is queued for at most `linger` milliseconds, then close everything."""
        self._zmq.destroy(linger=linger)


class Inbox:
    """The one PULL socket of a process. Messages are decoded and filtered by incarnation."""

    def __init__(self, context: Context, run_dir: str, address: Address, incarnation: int) -> None:
        path = inbox_path(run_dir, address)
        # Binding a live ipc path succeeds silently and splits its stream between two readers.
        self._lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ChannelError(f"inbox {path} is in use by a running process") from error
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        # accept() filters by the peer's credentials: other users cannot write to us.
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        try:
            self._socket.bind("ipc://" + path)
        except zmq.ZMQError as error:
            self._socket.close()
            os.close(self._lock)
            raise ChannelError(f"inbox {path} cannot be bound: {error}") from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._decoder = msgspec.msgpack.Decoder(INBOXES[address.kind])
        self._incarnation = incarnation
        self._newest: dict[tuple[int, int, int], int] = {}  # by kind, index and rank
        self.address = address
        self.dropped_stale = 0

    @property
    def fd(self) -> int:
        """Edge-triggered: after it fires, call `drain` until it returns nothing."""
        return self._fd

    def wait(self, timeout: float) -> bool:
        """Wait for a message for at most `timeout` seconds, to the microsecond; return whether there is one."""
        end = time.monotonic() + timeout
        while not self._readable():
            left = end - time.monotonic()
            if left <= 0:
                return False
            # Not zmq's poll, which knows whole milliseconds only: steps are planned in tenths of them. The
            # descriptor also fires for events that are not ours, hence the loop.
            select.select([self.fd], [], [], left)
        return True

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def drain(self, limit: int = 4096) -> list[Message]:
        """Return all messages that have arrived (up to `limit`), control first, otherwise in order.

        An empty list means that the socket was empty. Raises ChannelError when a message cannot be
        decoded: going on would hang its caller.
        """
        return [message for _, message in self.drain_with_senders(limit)]

    def drain_with_senders(self, limit: int = 4096) -> list[tuple[Address, Message]]:
        """Like `drain`, each message with its sender."""
        messages: list[tuple[Address, Message]] = []
        control: list[tuple[Address, Message]] = []
        try:
            # Asking before each message is cheaper than the exception that an empty socket raises.
            while len(messages) + len(control) < limit and self._readable():
                received = self._decode(self._socket.recv(_NOBLOCK))
                if received is not None:
                    (control if isinstance(received[1], _CONTROL) else messages).append(received)
        except zmq.Again:
            pass
        return control + messages

    def _decode(self, frame: bytes) -> tuple[Address, Message] | None:
        try:
            kind, index, rank, sender, addressee = _HEADER.unpack_from(frame)
            address = _address(kind, index, rank)
            newest = self._newest.get((kind, index, rank), 0)
            if sender < newest or addressee not in (0, self._incarnation):
                self.dropped_stale += 1
                return None
            message: Message = self._decoder.decode(memoryview(frame)[_HEADER.size :])
        except (struct.error, ValueError, msgspec.DecodeError) as error:
            raise ChannelError(f"{self.address} received a message that it cannot decode: {error}") from error
        if sender > newest:
            self._newest[kind, index, rank] = sender
        return address, message

    def drop_older(self, address: Address, incarnation: int) -> None:
        """Drop what incarnations of a stage before this one sent, from now on."""
        key = (int(address.kind), address.index, address.rank)
        self._newest[key] = max(self._newest.get(key, 0), incarnation)

    def close(self) -> None:
        self._socket.close()
        os.close(self._lock)


class Outbox:
    """The PUSH socket to one inbox. `send` never blocks: what ZeroMQ does not accept is queued here, in order.

    The queue has no limit of its own: the server limits what is in flight in the whole ring.
    """

    def __init__(self, context: Context, run_dir: str, sender: Address, incarnation: int, to: Address) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect("ipc://" + inbox_path(run_dir, to))
        self._encoder = msgspec.msgpack.Encoder()
        self._sender = (int(sender.kind), sender.index, sender.rank, incarnation)
        self._overflow: deque[bytes] = deque()
        self.to = to
        self.address_incarnation(0)

    def address_incarnation(self, incarnation: int) -> None:
        """Write to this incarnation of the addressee only; 0 = whichever holds the inbox."""
        self._header = _HEADER.pack(*self._sender, incarnation)

    def send(self, message: Message) -> None:
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Send a message that is already encoded."""
        self._overflow.append(self._header + body)
        self.flush()

    def flush(self) -> bool:
        """Send what is queued; return whether nothing is left. The loop calls it while `backlog` is not 0."""
        try:
            while self._overflow:
                self._socket.send(self._overflow[0], _NOBLOCK)
                self._overflow.popleft()
        except zmq.Again:
            return False
        return True

    @property
    def backlog(self) -> int:
        """Messages that ZeroMQ has not accepted yet."""
        return len(self._overflow)

    def close(self) -> None:
        """Close; what ZeroMQ has accepted is still sent within the context's linger time."""
        self._socket.close()


def flush_all(outboxes: Collection[Outbox], timeout: float) -> int:
    """Try for `timeout` seconds to empty all backlogs; return how many messages are left."""
    end = time.monotonic() + timeout
    while True:
        left = sum(outbox.backlog for outbox in outboxes if not outbox.flush())
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.001)


@lru_cache(maxsize=1024)
def _address(kind: int, index: int, rank: int) -> Address:
    return Address(StageKind(kind), index, rank)


def encode(message: Message) -> bytes:
    """Encode a message that travels inside another one."""
    return msgspec.msgpack.encode(message)


def decode_as(body: bytes, kind: type[Any]) -> Any:
    """Inverse of `encode`."""
    return msgspec.msgpack.decode(body, type=kind)
