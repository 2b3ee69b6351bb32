"""The model's manifest comes from a process of its own, which is shown, believed and ended."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.console import Console
from engine.preparation import PreparationError, prepare_model
from engine.processes import DeathPipe
from proto.model import ModelManifest
from tests.engine_fakes.fake_serve import MANIFEST

pytestmark = pytest.mark.slow


@pytest.fixture
def pipe() -> Iterator[DeathPipe]:
    pipe = DeathPipe()
    yield pipe
    pipe.close()


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, flags: str = "") -> None:
    """Have a shell script run instead of `python -P -m engine.models a/b --out m.json`."""
    path = folder / "python"
    expected = f"-P -m engine.models a/b --out {folder}/m.json{flags}"
    path.write_text(f'#!/bin/sh\n[ "$*" = "{expected}" ] || exit 99\n{script}\n')
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def prepare(folder: Path, pipe: DeathPipe, needs_weights: bool = True, seconds: float = 20.0) -> ModelManifest | None:
    """Cancelled after some seconds."""
    end = time.monotonic() + seconds
    return prepare_model(
        "a/b",
        folder / "m.json",
        needs_weights=needs_weights,
        death_fd=pipe.read_fd,
        console=Console(),
        cancelled=lambda: time.monotonic() > end,
    )


@pytest.mark.parametrize("needs_weights", [True, False])
def test_the_manifest_is_read_and_progress_shown(
    tmp_path: Path,
    pipe: DeathPipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    needs_weights: bool,
) -> None:
    (tmp_path / "made.json").write_bytes(msgspec.json.encode(MANIFEST))
    script = f"echo fetching 5/10 MB >&2; cp {tmp_path}/made.json {tmp_path}/m.json"
    stand_in(monkeypatch, tmp_path, script, "" if needs_weights else " --no-weights")
    assert prepare(tmp_path, pipe, needs_weights) == MANIFEST
    assert capfd.readouterr().err == "supervisor: fetching 5/10 MB\n"


def test_a_refusal_is_shown(
    tmp_path: Path, pipe: DeathPipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, tmp_path, "printf 'model.safetensors is cut off' >&2; exit 2")
    with pytest.raises(PreparationError, match="--model a/b cannot be used"):
        prepare(tmp_path, pipe)
    assert capfd.readouterr().err == "supervisor: model.safetensors is cut off\n"


def test_a_long_preparation_can_be_cancelled(tmp_path: Path, pipe: DeathPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "sleep 60; exit 0")
    began = time.monotonic()
    assert prepare(tmp_path, pipe, seconds=0.3) is None
    assert time.monotonic() - began < 5.0
