"""Inboxes and outboxes over real ipc sockets, with readers that die, stop and come back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from proto import channel
from proto.channel import ChannelError, Context, Inbox, Outbox, flush_all, inbox_path
from proto.ids import SUPERVISOR, Address, StageKind
from proto.messages import Census, Drained, Flush, Message, Reset, Stop, World

SCHEDULER = Address(StageKind.SCHEDULER, 0)
SERVER = Address(StageKind.SERVER, 0)
WORKER = Address(StageKind.WORKER, 0)

READER = """
import sys, time
from proto.channel import Address, Context, Inbox
from proto.ids import StageKind
inbox = Inbox(Context(), sys.argv[1], Address(StageKind.WORKER, 0), int(sys.argv[2]))
print("bound", flush=True)
while True:
    inbox.wait(1.0)
    for message in inbox.drain():
        print(message.epoch, flush=True)
"""


class Ring:
    """Makes inboxes and outboxes of one run directory, and ends them all."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self.context = Context()
        self._readers: list[subprocess.Popen[str]] = []

    def inbox(self, address: Address, incarnation: int = 1) -> Inbox:
        return Inbox(self.context, self.run_dir, address, incarnation)

    def outbox(self, sender: Address, to: Address, incarnation: int = 1) -> Outbox:
        return Outbox(self.context, self.run_dir, sender, incarnation, to)

    def reader(self, incarnation: int) -> "subprocess.Popen[str]":
        """A worker in a process of its own that prints the epoch of each Reset."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", READER, self.run_dir, str(incarnation)], stdout=subprocess.PIPE, text=True
        )
        self._readers.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "bound\n"
        return process

    def close(self) -> None:
        for process in self._readers:
            process.kill()
            process.wait()
        self.context.close(linger=0)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring(tmp_path)
    yield ring
    ring.close()


def receive(inbox: Inbox, count: int, timeout: float = 5.0) -> list[Message]:
    """Exactly `count` messages, and no more than come at once with them."""
    end = time.monotonic() + timeout
    messages: list[Message] = []
    while len(messages) < count:
        assert time.monotonic() < end, f"{len(messages)} of {count} messages came"
        inbox.wait(0.1)
        messages += inbox.drain()
    return messages


def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def epochs(messages: list[Message]) -> list[int]:
    return [message.epoch for message in messages if isinstance(message, Reset)]


def test_messages_arrive_in_order_and_name_their_sender(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    outbox = ring.outbox(SCHEDULER, WORKER)
    for epoch in range(100):
        outbox.send(Reset(epoch))
    inbox.wait(1.0)
    time.sleep(0.1)
    received = inbox.drain_with_senders()
    assert [sender for sender, _ in received] == [SCHEDULER] * 100
    assert epochs([message for _, message in received]) == list(range(100))


def test_control_comes_before_data(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    outbox = ring.outbox(SCHEDULER, WORKER)
    world = World()
    for message in (Reset(1), Reset(2), world, Stop()):
        outbox.send(message)
    time.sleep(0.2)
    assert inbox.drain() == [world, Stop(), Reset(1), Reset(2)]


def test_drain_keeps_its_limit_and_forgets_nothing(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    outbox = ring.outbox(SCHEDULER, WORKER)
    for epoch in range(25):
        outbox.send(Reset(epoch))
    time.sleep(0.2)
    batches = [inbox.drain(limit=10) for _ in range(4)]
    assert [len(batch) for batch in batches] == [10, 10, 5, 0]
    assert epochs([message for batch in batches for message in batch]) == list(range(25))


def test_a_live_inbox_cannot_be_bound_twice(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    with pytest.raises(ChannelError, match="worker-0-0 is in use by a running process"):
        ring.inbox(WORKER)
    inbox.close()
    ring.inbox(WORKER).close()


def test_a_live_inbox_of_another_process_cannot_be_bound(ring: Ring) -> None:
    reader = ring.reader(1)
    with pytest.raises(ChannelError, match="in use by a running process"):
        ring.inbox(WORKER)
    reader.kill()
    reader.wait()
    ring.inbox(WORKER, 2)


def test_a_long_path_is_refused_with_its_length(ring: Ring) -> None:
    run_dir = "/tmp/" + "x" * 93
    assert len(inbox_path(run_dir[:-3], WORKER)) <= channel.MAX_IPC_PATH
    with pytest.raises(ChannelError, match=r"has 109 bytes; ipc sockets take at most 107"):
        inbox_path(run_dir, WORKER)


def test_what_the_dead_still_send_is_dropped_and_counted(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    old = ring.outbox(SCHEDULER, WORKER, incarnation=4)
    new = ring.outbox(SCHEDULER, WORKER, incarnation=7)
    old.send(Reset(1))
    assert epochs(receive(inbox, 1)) == [1]
    new.send(Reset(2))
    assert epochs(receive(inbox, 1)) == [2]
    old.send(Reset(3))
    eventually(lambda: (inbox.drain(), inbox.dropped_stale)[1] == 1)


def test_a_new_incarnation_is_learnt_before_it_speaks(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    inbox.drop_older(SCHEDULER, 9)
    ring.outbox(SCHEDULER, WORKER, incarnation=8).send(Reset(1))
    eventually(lambda: (inbox.drain(), inbox.dropped_stale)[1] == 1)


def test_ranks_and_replicas_are_senders_of_their_own(ring: Ring) -> None:
    """Each with an inbox and with incarnations of its own."""
    addresses = [Address(StageKind.WORKER, replica, rank) for replica in (0, 1) for rank in (0, 1)]
    inboxes = [ring.inbox(address) for address in addresses]
    assert [str(inbox.address) for inbox in inboxes] == ["worker-0-0", "worker-0-1", "worker-1-0", "worker-1-1"]
    supervisor = ring.inbox(SUPERVISOR)
    for incarnation, address in zip((9, 8, 7, 6), addresses, strict=True):
        supervisor.drop_older(address, incarnation)
        ring.outbox(address, SUPERVISOR, incarnation).send(Drained())
        ring.outbox(address, SUPERVISOR, incarnation - 1).send(Drained())
    senders: set[Address] = set()

    def all_came() -> bool:
        senders.update(sender for sender, _ in supervisor.drain_with_senders())
        return supervisor.dropped_stale == len(addresses) and len(senders) == len(addresses)

    eventually(all_came)
    assert senders == set(addresses)


def test_a_message_for_a_predecessor_is_dropped(ring: Ring) -> None:
    inbox = ring.inbox(WORKER, incarnation=5)
    outbox = ring.outbox(SCHEDULER, WORKER)
    outbox.address_incarnation(4)
    outbox.send(Reset(1))
    outbox.address_incarnation(5)
    outbox.send(Reset(2))
    assert epochs(receive(inbox, 1)) == [2]
    assert inbox.dropped_stale == 1


@pytest.mark.parametrize(
    "body", [b"\xc1", b"", b"\x91\xa7unknown", channel.encode(Flush(rid=1))], ids=["garbage", "empty", "tag", "inbox"]
)
def test_what_cannot_be_decoded_is_an_error(ring: Ring, body: bytes) -> None:
    """A message of another inbox's union too: going on would hang whoever waits for an answer."""
    inbox = ring.inbox(WORKER)
    ring.outbox(SCHEDULER, WORKER).send_encoded(body)
    inbox.wait(1.0)
    with pytest.raises(ChannelError, match="worker-0-0 received a message that it cannot decode"):
        inbox.drain()


def test_a_frame_without_header_is_an_error(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    socket = ring.context.socket(zmq.PUSH)
    socket.connect("ipc://" + inbox_path(ring.run_dir, WORKER))
    socket.send(b"abc")
    inbox.wait(1.0)
    with pytest.raises(ChannelError, match="cannot decode"):
        inbox.drain()


def test_a_full_reader_never_blocks_its_sender(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a high-water mark of 2, all else waits in the outbox, in order, and leaves when asked to."""
    monkeypatch.setattr(channel, "_HIGH_WATER_MARK", 2)
    inbox = ring.inbox(WORKER)
    outbox = ring.outbox(SCHEDULER, WORKER)
    began = time.monotonic()
    for epoch in range(500):
        outbox.send(Reset(epoch))
    assert time.monotonic() - began < 1.0
    assert outbox.backlog > 400
    received: list[Message] = []
    while not outbox.flush() or len(received) < 500:
        received += inbox.drain()
    assert epochs(received) == list(range(500))
    assert outbox.backlog == 0


def test_two_full_stages_do_not_wait_for_each_other(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HIGH_WATER_MARK", 2)
    inboxes = [ring.inbox(SCHEDULER), ring.inbox(WORKER)]
    there, back = ring.outbox(SERVER, SCHEDULER), ring.outbox(SCHEDULER, WORKER)
    for number in range(200):
        there.send(Census(server=0, rids=b"", attempts=number.to_bytes(4, "little")))
        back.send(Reset(number))
    counts = [0, 0]
    end = time.monotonic() + 10
    while counts != [200, 200]:
        assert time.monotonic() < end
        there.flush()
        back.flush()
        for index, inbox in enumerate(inboxes):
            counts[index] += len(inbox.drain())


def test_a_sender_may_come_first(ring: Ring) -> None:
    outbox = ring.outbox(SCHEDULER, WORKER)
    outbox.send(Reset(1))
    assert epochs(receive(ring.inbox(WORKER), 1)) == [1]


@pytest.mark.slow
def test_a_successor_takes_over_a_killed_readers_name(ring: Ring) -> None:
    """What the dead one had is lost in one piece; whatever is sent to the successor arrives, in order."""
    first = ring.reader(1)
    outbox = ring.outbox(SCHEDULER, WORKER)
    outbox.address_incarnation(1)
    for epoch in range(50):
        outbox.send(Reset(epoch))
    assert first.stdout is not None
    assert [int(first.stdout.readline()) for _ in range(50)] == list(range(50))
    os.kill(first.pid, signal.SIGSTOP)
    for epoch in range(50, 100):
        outbox.send(Reset(epoch))
    first.kill()
    first.wait()
    second = ring.reader(2)
    outbox.address_incarnation(2)
    for epoch in range(100, 200):
        outbox.send(Reset(epoch))
    assert second.stdout is not None
    assert [int(second.stdout.readline()) for _ in range(100)] == list(range(100, 200))


def test_wait_counts_microseconds(ring: Ring) -> None:
    """A wait of 0.3 ms neither returns at once nor, where the machine lets it, takes zmq's whole millisecond."""
    inbox = ring.inbox(WORKER)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        assert not inbox.wait(0.0003)
        times.append(time.perf_counter() - began)
    assert 0.0003 <= min(times) < 0.001


def test_wait_ends_with_a_message(ring: Ring) -> None:
    inbox = ring.inbox(WORKER)
    outbox = ring.outbox(SCHEDULER, WORKER)
    for epoch in range(200):
        outbox.send(Reset(epoch))
        assert inbox.wait(5.0), "the edge of a message was missed"
        assert epochs(inbox.drain()) == [epoch]


def test_an_exit_hands_over_what_waits(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HIGH_WATER_MARK", 2)
    outbox = ring.outbox(SCHEDULER, WORKER)
    for epoch in range(10):
        outbox.send(Reset(epoch))
    began = time.monotonic()
    assert flush_all([outbox], 0.2) == outbox.backlog > 0, "nobody reads"
    assert 0.2 <= time.monotonic() - began < 0.5


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_other_users_cannot_write(ring: Ring, tmp_path: Path) -> None:
    """Even where the run directory's own 0700 is taken away."""
    inbox = ring.inbox(WORKER)
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp/"):
            path.chmod(0o711)
    os.chmod(inbox_path(ring.run_dir, WORKER), 0o777)
    send = f"""
import os, zmq, time
os.setgroups([]); os.setgid(65534); os.setuid(USER)
socket = zmq.Context().socket(zmq.PUSH)
socket.linger = 300
socket.connect("ipc://{inbox_path(ring.run_dir, WORKER)}")
socket.send({channel._HEADER.pack(3, 0, 0, 1, 0) + channel.encode(Reset(1))!r}, zmq.NOBLOCK)
"""
    for user, arrives in ((65534, False), (0, True)):
        code = send.replace("USER", str(user))
        subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=20)
        assert inbox.wait(0.5) is arrives
