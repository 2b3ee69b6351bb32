"""A stage of any kind that plays no music: it starts, drains and ends as the real ones do.

QUINTET_FAKE holds JSON: {"worker": "exit-at-start"} makes that kind misbehave, see `_misbehave`.
"""

import ctypes
import json
import os
import sys
import threading
import time

from engine.runtime.stage import Stage, is_ready
from proto.config import load_config
from proto.ids import SUPERVISOR, Address, StageKind
from proto.messages import Drained, Heartbeat, Message, Ready, Serving, World

KIND = load_config(sys.argv[1]).kind
BEHAVIOUR = json.loads(os.environ.get("QUINTET_FAKE", "{}")).get(KIND.label, "")


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class FakeLoop:
    """Serves when all are ready; a `busy` server holds a stream for a second after a drain began."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._served = False
        self._drain_at: float | None = None

    def on_message(self, message: Message) -> None:
        if not isinstance(message, World) or KIND is not StageKind.SERVER:
            return
        if message.failure:
            _log(f"streams end: {message.failure.splitlines()[0]}")
            self._stage.outbox(SUPERVISOR).send(Drained())
        elif message.draining and self._drain_at is None and BEHAVIOUR != "never-drains":
            self._drain_at = time.monotonic() + (1.0 if BEHAVIOUR == "busy" else 0.0)
        elif not self._served and len(message.stages) == 6 and all(is_ready(info) for info in message.stages):
            self._served = True
            self._stage.outbox(SUPERVISOR).send(Serving())

    def step(self, now: int) -> float | None:
        if BEHAVIOUR == "bug":
            raise KeyError("a bug")
        if self._drain_at is not None and time.monotonic() >= self._drain_at:
            self._drain_at = float("inf")
            _log("drained")
            self._stage.outbox(SUPERVISOR).send(Drained())
        return None if self._drain_at is None else 0.05

    def heartbeat(self) -> Heartbeat:
        return Heartbeat({"steps": 1.0})


def _misbehave(stage: Stage) -> None:
    """What goes wrong before Ready."""
    match BEHAVIOUR:
        case "exit-at-start":
            _log("weights are corrupt: model.safetensors")
            sys.exit(7)
        case "never-ready":
            time.sleep(60)
        case "other-schema":
            stage.outbox(SUPERVISOR).send(Ready(pid=os.getpid(), schema="0123456789abcdef"))
            time.sleep(60)
        case "flood":
            for number in range(20_000):
                _log(f"line {number} " + "x" * 60)


def _hold_the_gil() -> None:
    """From two seconds after Ready: native code that never comes back and lets no other thread run."""
    time.sleep(2)
    ctypes.PyDLL(None).sleep(120)


def main() -> None:
    stage = Stage.boot(KIND)
    _misbehave(stage)
    stage.ready()
    if BEHAVIOUR == "hold-gil":
        threading.Thread(target=_hold_the_gil, daemon=True).start()
    if BEHAVIOUR == "hang":
        while not is_ready(stage.find(Address(StageKind.SERVER, 0))):
            stage.inbox.wait(0.1)
            for message in stage.inbox.drain():
                if isinstance(message, World):
                    stage.adopt_world(message)
        threading.Event().wait()
    stage.run(FakeLoop(stage))


if __name__ == "__main__":
    main()
