"""The loops of rank 0 and of the others, over devices that only remember."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from proto.ids import Address, StageKind
from proto.messages import Message, Reset, StepPlan, Stop
from tests.builders import make_plan
from worker.device import Deferred
from worker.ranks import followers as ranks
from worker.ranks.followers import FollowerLoop, Followers
from worker.ranks.group import PeerLostError


class FakeDevice:
    def __init__(self) -> None:
        self.done: list[object] = []
        self.lost = False
        self.late: Callable[[], Any] | None = None  # how a step is waited for

    def launch(self, plan: StepPlan) -> Deferred | None:
        if self.lost:
            raise PeerLostError("rank 0 is gone")
        self.done.append(plan.step)
        return None if self.late is None else Deferred(self.late)

    def reset(self, epoch: int) -> None:
        self.done.append(f"reset {epoch}")


class FakeOutbox:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_encoded(self, body: bytes) -> None:
        self.sent.append(body)


class FakeInbox:
    def __init__(self) -> None:
        self.waiting: list[list[Message]] = []

    def wait(self, timeout: float) -> bool:
        if not self.waiting:
            time.sleep(timeout)
        return bool(self.waiting)

    def drain(self) -> list[Message]:
        return self.waiting.pop()


class FakeStage:
    def __init__(self) -> None:
        self.address = Address(StageKind.WORKER, 3)
        self.inbox = FakeInbox()
        self.outboxes: dict[Address, FakeOutbox] = {}
        self.stopping = False
        self.code: int | None = None

    def outbox(self, to: Address) -> FakeOutbox:
        return self.outboxes.setdefault(to, FakeOutbox())

    def stop(self) -> None:
        self.stopping = True

    def exit(self, code: int) -> None:
        self.code = code
        raise SystemExit(code)


def make_loop() -> tuple[FollowerLoop, FakeDevice, FakeStage]:
    device, stage = FakeDevice(), FakeStage()
    unchecked: Any = stage
    return FollowerLoop(unchecked, device), device, stage  # type: ignore[arg-type]


def test_every_other_rank_gets_the_same_bytes() -> None:
    stage = FakeStage()
    unchecked: Any = stage
    messages: list[StepPlan | Reset] = [Reset(epoch=1), make_plan(step=1)]
    followers = Followers(unchecked, 3)
    for message in messages:
        followers.tell(message)
    assert list(stage.outboxes) == [Address(StageKind.WORKER, 3, 1), Address(StageKind.WORKER, 3, 2)]
    for outbox in stage.outboxes.values():
        assert [msgspec.msgpack.decode(body, type=StepPlan | Reset) for body in outbox.sent] == messages


def test_a_follower_never_skips_what_rank_0_launched_before_a_reset() -> None:
    """Rank 0 waits for the others in the middle of those steps."""
    loop, device, _ = make_loop()
    orders: list[Message] = [make_plan(step=1), make_plan(step=2), Reset(epoch=2), make_plan(step=1)]
    for order in orders:
        loop.on_message(order)
    waits = [loop.step(0) for _ in range(5)]
    assert device.done == [1, 2, "reset 2", 1]
    assert waits == [0.0, 0.0, 0.0, None, None]


def test_a_follower_waits_for_late_steps_beside_its_launches() -> None:
    """As rank 0's output thread does: only then is a step's memory on the host free again."""
    loop, device, _ = make_loop()
    over, seen = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        assert over.wait(5)
        seen.release()

    device.late = wait
    for step in (1, 2, 3):
        loop.on_message(make_plan(step=step))
        loop.step(0)
    assert device.done == [1, 2, 3]  # all launched before the first was over
    over.set()
    assert all(seen.acquire(timeout=5) for _ in range(3))


@pytest.mark.parametrize("stopped", ["", "told", "telling"])
def test_a_rank_that_loses_another_lets_that_be_blamed_or_ends_as_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stopped: str
) -> None:
    monkeypatch.setattr(ranks, "_BLAME_SECONDS", 0.2)
    loop, device, stage = make_loop()
    device.lost = True
    loop.on_message(make_plan(step=1))
    stage.stopping = stopped == "told"
    if stopped == "telling":
        stage.inbox.waiting.append([make_plan(step=2), Stop()])
    began = time.monotonic()
    with pytest.raises(SystemExit):
        loop.step(0)
    if stopped:
        assert stage.code == 0
        assert not caplog.text
    else:
        assert stage.code not in (0, None)
        assert time.monotonic() - began >= 0.2
        assert "rank 0 is gone" in caplog.text
