"""One tokenizer or detokenizer process, with a test in the places of all others."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from proto.channel import Context, Inbox, Outbox
from proto.config import DetokenizerOptions, TokenizerOptions
from proto.ids import Address, StageKind
from proto.messages import Heartbeat, Message, Ready, Stop, WorkerFacts
from tests.builders import make_stage, make_stage_config, make_world
from tests.metrics_check import assert_complete

ROOT = Path(__file__).parent.parent
_PACKAGES = {StageKind.TOKENIZER: "tokenizer_proc", StageKind.DETOKENIZER: "detokenizer_proc"}


class TextStage:
    """Starts the process; use as a context manager, which sends Stop and expects exit code 0."""

    def __init__(self, kind: StageKind, options: TokenizerOptions | DetokenizerOptions) -> None:
        self._kind = kind
        # Not below pytest's folder: its names are too long for sockets.
        self._run_dir = tempfile.mkdtemp(prefix="quintet-test-")
        self._context = Context()
        self.supervisor = self._inbox(StageKind.SUPERVISOR)
        self.server = self._inbox(StageKind.SERVER)
        self.scheduler = self._inbox(StageKind.SCHEDULER)
        sender, to = Address(StageKind.SERVER, 0), Address(kind, 0)
        self.outbox = Outbox(self._context, self._run_dir, sender, 1, to)
        config = make_stage_config(kind, self._run_dir, options, incarnation=2)
        document = Path(self._run_dir, "config.json")
        document.write_bytes(msgspec.json.encode(config))
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PACKAGES[kind], str(document)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def _inbox(self, kind: StageKind) -> Inbox:
        return Inbox(self._context, self._run_dir, Address(kind, 0), 1)

    def __enter__(self) -> "TextStage":
        return self

    def __exit__(self, *_: object) -> None:
        self.outbox.send(Stop())
        code, last_words = self._end()
        assert code == 0, last_words

    def failure(self) -> str:
        """Last words of a process that gives up by itself."""
        code, last_words = self._end()
        assert code == 1, last_words
        return last_words

    def _end(self) -> tuple[int, str]:
        try:
            _, last_words = self.process.communicate(timeout=15)
        finally:
            self.process.kill()
            self.process.wait()
            self.outbox.close()
            for inbox in (self.supervisor, self.server, self.scheduler):
                inbox.close()
            self._context.close()
            shutil.rmtree(self._run_dir)
        return self.process.returncode, last_words

    def receive(
        self, inbox: Inbox, wanted: Callable[[Message], bool] = lambda _: True, seconds: float = 20.0
    ) -> Message:
        """The next message that is wanted; others are passed over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.outbox.flush()
            inbox.wait(0.02)
            for message in inbox.drain(limit=1):
                if wanted(message):
                    return message
        raise AssertionError(f"nothing came within {seconds} s; exit code {self.process.poll()}")

    def ready(self) -> tuple[Ready, float]:
        """Its Ready, and the seconds that it took."""
        message = self.receive(self.supervisor, lambda m: isinstance(m, Ready))
        assert isinstance(message, Ready)
        return message, time.monotonic() - self.started

    def counters(self, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The next heartbeat that is wanted."""
        message = self.receive(self.supervisor, lambda m: isinstance(m, Heartbeat) and wanted(m.counters))
        assert isinstance(message, Heartbeat)
        assert_complete(self._kind, message)
        return message.counters

    def tell_of_worker(self, facts: WorkerFacts) -> None:
        self.outbox.send(make_world(make_stage(StageKind.WORKER, incarnation=3, facts=facts)))

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def maps(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()
