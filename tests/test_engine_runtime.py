"""What every stage's process is made of, with this test as its supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.config import ServeConfig
from engine.documents import Surroundings, stage_config
from engine.runtime.stage import BusyShare
from proto.channel import Context, Inbox, Outbox
from proto.ids import SUPERVISOR, Address, StageKind
from proto.messages import SCHEMA_HASH, Heartbeat, Message, Ready, Stop
from tests.builders import make_stage, make_world
from tests.engine_fakes.fake_serve import MANIFEST

FAKES = Path(__file__).parent / "engine_fakes"
SCHEDULER = Address(StageKind.SCHEDULER, 0)


class Desk:
    """The supervisor's side: an inbox, and stages by hand."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self.context = Context()
        self.inbox = Inbox(self.context, self.run_dir, SUPERVISOR, 1)
        self.outbox = Outbox(self.context, self.run_dir, SUPERVISOR, 1, SCHEDULER)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, behaviour: str = "", death_fd: int = -1, inherit: tuple[int, ...] = ()) -> "subprocess.Popen[str]":
        around = Surroundings(MANIFEST, port=1, run_dir=self.run_dir, death_fd=death_fd, supervisor_incarnation=1)
        path = Path(self.run_dir) / "scheduler-0.json"
        path.write_bytes(msgspec.json.encode(stage_config(ServeConfig(model="fake"), around, SCHEDULER, 2)))
        return self.run(str(path), behaviour, inherit)

    def run(self, path: str, behaviour: str = "", inherit: tuple[int, ...] = ()) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fake_stage", path],
            env={**os.environ, "PYTHONPATH": str(FAKES), "QUINTET_FAKE": json.dumps({"scheduler": behaviour})},
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=inherit,
        )
        self.processes.append(process)
        return process

    def hear(self, kind: type[Message]) -> Message:
        """The next message of this kind."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            self.inbox.wait(0.1)
            for message in self.inbox.drain(limit=1):
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} came")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.inbox.close()
        self.context.close(linger=0)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, stderr = process.communicate(timeout=20)
    return process.returncode, stderr


@pytest.mark.slow
def test_a_stage_gets_ready_beats_and_stops(desk: Desk) -> None:
    process = desk.start()
    ready = desk.hear(Ready)
    assert ready == Ready(pid=process.pid, schema=SCHEMA_HASH)
    assert psutil.Process(process.pid).cmdline()[0] == "quintet scheduler 0"
    began = time.monotonic()
    beats = [desk.hear(Heartbeat) for _ in range(3)]
    assert 1.5 < time.monotonic() - began < 4.0
    counters = beats[-1].counters if isinstance(beats[-1], Heartbeat) else {}
    assert counters["steps"] == 1.0
    assert (counters["backlog"], counters["dropped_stale"]) == (0.0, 0.0)
    assert 0.0 <= counters["loop_busy_share"] < 0.5
    desk.outbox.send(Stop())
    assert end_of(process) == (0, "")


@pytest.mark.slow
def test_a_stage_by_hand_ends_with_sigterm(desk: Desk) -> None:
    process = desk.start()
    desk.hear(Ready)
    process.send_signal(signal.SIGINT)  # a terminal's, and not its to answer
    process.send_signal(signal.SIGTERM)
    assert end_of(process)[0] == 0


@pytest.mark.slow
def test_a_bug_ends_the_stage_with_its_story(desk: Desk) -> None:
    code, stderr = end_of(desk.start("bug"))
    assert code == 4
    assert "C scheduler-0" in stderr
    assert "internal error; this process ends" in stderr
    assert "KeyError: 'a bug'" in stderr


@pytest.mark.slow
def test_a_message_that_it_cannot_read_ends_the_stage(desk: Desk) -> None:
    process = desk.start()
    desk.hear(Ready)
    desk.outbox.send_encoded(b"\xc1")
    code, stderr = end_of(process)
    assert code == 3
    assert "scheduler-0 received a message that it cannot decode" in stderr


@pytest.mark.slow
def test_a_stage_hears_only_its_newest_peers(desk: Desk) -> None:
    """After a World, what an older incarnation of a peer still sends is dropped."""
    process = desk.start()
    desk.hear(Ready)
    server = Address(StageKind.SERVER, 0)
    desk.outbox.send(make_world(make_stage(StageKind.SERVER, incarnation=7)))
    for _ in range(3):
        desk.hear(Heartbeat)  # the World is read by now
    stale = Outbox(desk.context, desk.run_dir, server, 6, SCHEDULER)
    stale.send_encoded(b"\xc1")  # not even decoded
    end = time.monotonic() + 10
    while True:
        beat = desk.hear(Heartbeat)
        assert isinstance(beat, Heartbeat)
        if beat.counters["dropped_stale"] == 1.0:
            break
        assert time.monotonic() < end
    desk.outbox.send(Stop())
    assert end_of(process)[0] == 0


@pytest.mark.slow
def test_a_second_stage_of_the_name_is_refused(desk: Desk) -> None:
    desk.start()
    desk.hear(Ready)
    code, stderr = end_of(desk.start())
    assert code == 1
    assert "is in use by a running process" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_bad_document_is_named(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"kind": 3, "index": "first"}')
    code, stderr = end_of(
        subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.argv[1:] = [{str(path)!r}]; {BOOT}"],
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert code == 1
    assert f"{path} is not the configuration of a stage: Expected `int`, got `str` - at `$.index`" in stderr


BOOT = "from engine.runtime.stage import Stage, StageKind; Stage.boot(StageKind.SCHEDULER)"


@pytest.mark.slow
def test_a_stage_whose_supervisor_is_gone_does_not_begin(desk: Desk) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    code, stderr = end_of(desk.start(death_fd=read_end, inherit=(read_end,)))
    os.close(read_end)
    # Either the signal or the look at the pipe comes first.
    assert (code, stderr) in [(-signal.SIGKILL, ""), (1, "the supervisor is gone\n")]


@pytest.mark.slow
def test_a_document_of_another_run_says_what_to_change(desk: Desk) -> None:
    code, stderr = end_of(desk.start(death_fd=99))
    assert code == 1
    assert "death pipe 99 is not open (set death_fd to -1 to start a stage by hand)" in stderr


def test_busy_share_is_the_part_without_waiting() -> None:
    share = BusyShare(now=10.0)
    share.idle = 1.5
    assert share.measure(now=12.0) == pytest.approx(0.25)
    assert share.measure(now=14.0) == 1.0
    share.idle = 9.0
    assert share.measure(now=16.0) == 0.0
