"""The scheduler as a process of its own: a test plays supervisor, worker, detokenizer and server."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from proto.channel import Context, Inbox, Outbox
from proto.ids import Address, StageKind
from proto.messages import (
    U8,
    U64,
    Emit,
    Finish,
    Heartbeat,
    Message,
    Ready,
    Reject,
    Reset,
    StageInfo,
    StepPlan,
    Stop,
    World,
    column,
)
from tests.builders import make_facts, make_scheduler_options, make_stage, make_stage_config, make_world
from tests.metrics_check import assert_complete
from tests.scheduler_fakes import FakeWorker, expected_output, make_admit, rid_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SCHEDULER = Address(StageKind.SCHEDULER, 0)
INCARNATION = 3


class Surroundings:
    """Everybody around one scheduler process."""

    def __init__(self, run_dir: Path) -> None:
        self.context = Context()
        self.facts = make_facts()
        self.worker = FakeWorker(self.facts)
        self.inboxes = {
            kind: Inbox(self.context, str(run_dir), Address(kind, 0), 1)
            for kind in (StageKind.SUPERVISOR, StageKind.WORKER, StageKind.DETOKENIZER, StageKind.SERVER)
        }
        self.outboxes = {
            kind: Outbox(self.context, str(run_dir), Address(kind, 0), 1, SCHEDULER)
            for kind in (StageKind.SUPERVISOR, StageKind.WORKER, StageKind.TOKENIZER)
        }
        config = make_stage_config(StageKind.SCHEDULER, str(run_dir), make_scheduler_options(), INCARNATION)
        document = run_dir / "scheduler-0.json"
        document.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler", str(document)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def world(self, worker_incarnation: int = 1) -> World:
        worker: StageInfo = msgspec.structs.replace(
            make_stage(StageKind.WORKER, 0, worker_incarnation), facts=self.facts
        )
        return make_world(worker, make_stage(StageKind.SERVER, 0, 1), make_stage(StageKind.DETOKENIZER, 0, 1))

    def receive(self, kind: StageKind, wanted: type[Message], seconds: float = 20.0) -> Message:
        """The next message of a type in that stage's inbox, while the worker goes on working."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.work()
            self.inboxes[kind].wait(0.002)
            for message in self.inboxes[kind].drain(limit=1):
                if isinstance(message, wanted):
                    return message
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate()[1])
        raise AssertionError(f"no {wanted.__name__} within {seconds} s")

    def work(self) -> None:
        for message in self.inboxes[StageKind.WORKER].drain():
            if isinstance(message, Reset):
                assert message.epoch == INCARNATION
                self.worker.reset(message)
            elif isinstance(message, StepPlan):
                self.worker.run(message)
        while self.worker.results:
            self.outboxes[StageKind.WORKER].send(self.worker.results.popleft())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.context.close()


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    surroundings = Surroundings(tmp_path_factory.mktemp("s"))
    yield surroundings
    surroundings.close()


def test_requests_run_through_the_process(ring: Surroundings) -> None:
    """Also one that comes before the worker is ready; and the process needs neither torch nor 60 MB."""
    early, late, bad = (make_admit(rid_of(n), [n, 2, 3], 12) for n in (1, 2, 3))
    ring.outboxes[StageKind.TOKENIZER].send(early)
    ring.outboxes[StageKind.SUPERVISOR].send(ring.world())
    ready = ring.receive(StageKind.SUPERVISOR, Ready)
    assert isinstance(ready, Ready)
    assert ready.pid == ring.process.pid
    ring.outboxes[StageKind.TOKENIZER].send(late)
    ring.outboxes[StageKind.TOKENIZER].send(msgspec.structs.replace(bad, max_new_tokens=100_000))
    ids: dict[int, list[int]] = {early.rid: [], late.rid: []}
    ended = 0
    while ended < 2:
        emit = ring.receive(StageKind.DETOKENIZER, Emit)
        assert isinstance(emit, Emit)
        for rid, token in zip(column(emit.rids, U64), column(emit.ids), strict=True):
            ids[int(rid)].append(int(token))
        ended += int((column(emit.finishes, U8) == Finish.LENGTH).sum())
    for admit in (early, late):
        assert ids[admit.rid] == expected_output(admit, ring.facts.vocab_size)[0]
    reject = ring.receive(StageKind.SERVER, Reject)
    assert isinstance(reject, Reject)
    assert reject.rid == bad.rid
    beat = ring.receive(StageKind.SUPERVISOR, Heartbeat)
    while isinstance(beat, Heartbeat) and beat.counters.get("finished") != 2:
        beat = ring.receive(StageKind.SUPERVISOR, Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert beat.counters["running"] == beat.counters["waiting"] == 0
    assert_complete(StageKind.SCHEDULER, beat)
    for histogram in beat.histograms.values():
        assert sum(histogram.counts) > 0
        assert histogram.sum > 0
    proc = Path(f"/proc/{ring.process.pid}")
    assert "torch" not in (proc / "maps").read_text()
    assert int((proc / "statm").read_text().split()[1]) * 4096 < 60e6
    ring.outboxes[StageKind.SUPERVISOR].send(Stop())
    assert ring.process.wait(10) == 0


def test_an_idle_scheduler_does_not_spin(ring: Surroundings) -> None:
    ring.outboxes[StageKind.SUPERVISOR].send(ring.world())
    ring.receive(StageKind.SUPERVISOR, Ready)
    ring.outboxes[StageKind.TOKENIZER].send(make_admit(rid_of(1), [1], 1))
    ring.receive(StageKind.DETOKENIZER, Emit)

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{ring.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    time.sleep(1.0)
    assert cpu_ticks() - before < 20


def test_the_end_of_its_worker_ends_the_stage(ring: Surroundings) -> None:
    ring.outboxes[StageKind.SUPERVISOR].send(ring.world())
    ring.receive(StageKind.SUPERVISOR, Ready)
    ring.outboxes[StageKind.SUPERVISOR].send(ring.world(worker_incarnation=2))
    _, errors = ring.process.communicate(timeout=20)
    assert ring.process.returncode == 4
    assert "worker 0 was replaced or has ended" in errors
