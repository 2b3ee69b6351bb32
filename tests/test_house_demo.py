"""scripts/demo as a newcomer runs it, and what is left of it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from scripts.check_imports import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (ROOT / ".venv" / "installed-cpu").exists(), reason="scripts/setup did not make this environment"
    ),
]
KINDS = {"supervisor", "server", "tokenizer", "scheduler", "worker", "detokenizer"}


def start(tmp: Path, *arguments: str) -> "subprocess.Popen[str]":
    """In a session of its own, as in a terminal, with run directories below `tmp`."""
    return subprocess.Popen(
        [ROOT / "scripts" / "demo", *arguments],
        env={**os.environ, "TMPDIR": str(tmp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def session_of(leader: int) -> list[psutil.Process]:
    """Running processes of a terminal session; the stages are in sessions of their own."""
    return [process for process in psutil.process_iter() if _session(process.pid) == leader and runs(process.pid)]


def runs(pid: int) -> bool:
    """Not a zombie either: an orphan's body is its new parent's to bury, in a container often late or never."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def test_answers_shows_its_processes_and_leaves_nothing(tmp_path: Path) -> None:
    demo = start(tmp_path, "What is the capital of France?")
    out, err = demo.communicate(timeout=280)
    assert demo.returncode == 0, err
    assert "> What is the capital of France?" in out
    assert "Paris" in out
    assert "TTFT" in err
    assert "tokens a second" in err
    rows = re.findall(r"^quintet (\w+).*? ready +(\d+) ", out, re.MULTILINE)
    assert {kind for kind, _ in rows} == KINDS
    pids = {int(pid) for _, pid in rows}
    assert len(pids) == len(KINDS)
    assert not any(runs(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_leaves_nothing(tmp_path: Path) -> None:
    demo = start(tmp_path)
    while not list(tmp_path.glob("quintet-*/worker-0-0")):
        assert demo.poll() is None
        time.sleep(0.05)
    stages = {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ())
    }
    os.killpg(demo.pid, signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert session_of(demo.pid) == []
    assert not any(runs(pid) for pid in stages)
    assert list(tmp_path.iterdir()) == []
