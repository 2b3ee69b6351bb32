"""Prepares a model in a process of its own (`engine.models`), so that the supervisor stays small."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.console import Console
from engine.processes import Process
from proto.model import ModelManifest

_LOOK_SECONDS = 0.05


class PreparationError(RuntimeError):
    """The model cannot be used; the reason has been printed."""


def prepare_model(
    name: str, out: Path, *, needs_weights: bool, death_fd: int, console: Console, cancelled: Callable[[], bool]
) -> ModelManifest | None:
    """Find, fetch and read a model, showing progress; return None if `cancelled` became true meanwhile."""
    command = [sys.executable, "-P", "-m", "engine.models", name, "--out", str(out)]
    process = Process(command if needs_weights else [*command, "--no-weights"], death_fd)
    try:
        while not process.reap():
            if cancelled():
                process.kill(process.pid)
            for line in process.read_lines() or ():
                console.say(line)
            time.sleep(_LOOK_SECONDS)
        for line in process.read_rest():
            console.say(line)
    finally:
        process.close()
    if cancelled():
        return None
    if process.status != 0:
        raise PreparationError(f"--model {name} cannot be used (see above)")
    return msgspec.json.decode(out.read_bytes(), type=ModelManifest)
