"""One worker process, with a test in the places of supervisor and scheduler."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from proto.channel import Context, Inbox, Outbox
from proto.config import WorkerOptions
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, Ready, StepResult, WorkerFacts
from tests.builders import make_stage_config
from tests.metrics_check import assert_complete

WORKER = Address(StageKind.WORKER, 0)
ROOT = Path(__file__).parent.parent


class Surroundings:
    """Inboxes of supervisor and scheduler, and one worker process."""

    def __init__(self, run_dir: Path, options: WorkerOptions) -> None:
        self.context = Context()
        self.supervisor = Inbox(self.context, str(run_dir), Address(StageKind.SUPERVISOR, 0), 1)
        self.scheduler = Inbox(self.context, str(run_dir), Address(StageKind.SCHEDULER, 0), 1)
        self.worker = Outbox(self.context, str(run_dir), Address(StageKind.SCHEDULER, 0), 1, WORKER)
        config = make_stage_config(StageKind.WORKER, str(run_dir), options)
        document = run_dir / "worker-0-0.json"
        document.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", str(document)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def receive(self, inbox: Inbox, kind: type[Message], seconds: float = 20.0) -> Message:
        """The next message of a kind; others are passed over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            inbox.wait(0.05)
            for message in inbox.drain(limit=1):
                if isinstance(message, kind):
                    return message
            assert self.process.poll() is None or inbox.wait(0), self.process.communicate()[1]
        raise AssertionError(f"no {kind.__name__} within {seconds} s")

    def facts(self) -> WorkerFacts:
        ready = self.receive(self.supervisor, Ready)
        assert isinstance(ready, Ready)
        assert ready.pid == self.process.pid
        assert isinstance(ready.facts, WorkerFacts)
        return ready.facts

    def result(self) -> StepResult:
        result = self.receive(self.scheduler, StepResult)
        assert isinstance(result, StepResult)
        return result

    def counters(self) -> dict[str, float]:
        beat = self.receive(self.supervisor, Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert_complete(StageKind.WORKER, beat)
        return beat.counters

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.context.close()
