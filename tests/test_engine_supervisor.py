"""Whole instances of fake stages: killed, stopped, starved, asked to end. Processes, signals and sockets are real."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.instance import Instance, InstanceError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

FAKES = Path(__file__).parent / "engine_fakes"
STAGES = ("server", "tokenizer", "scheduler", "worker", "detokenizer")
START_SECONDS = 20.0


class FakeInstance:
    """`quintet serve` with fake stages, in a working directory and run directory of its own."""

    def __init__(self, folder: Path, *flags: str, cwd: Path | None = None, **behaviour: str) -> None:
        self.parent = folder / "run"
        self.parent.mkdir(exist_ok=True)
        self.ready_file = folder / "ready.json"
        self.ready_file.unlink(missing_ok=True)
        self.lines: deque[str] = deque(maxlen=100_000)
        self.facts: dict[str, object] = {}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "fake_serve", "--ready-file", str(self.ready_file)),
                *("--run-dir", str(self.parent), "--port", "0", *flags),
            ],
            env={**os.environ, "PYTHONPATH": str(FAKES), "QUINTET_FAKE": json.dumps(behaviour)},
            cwd=cwd or folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def serving(self) -> "FakeInstance":
        until(lambda: self.ready_file.exists() or self._process.poll() is not None, START_SECONDS, lambda: self.output)
        assert self._process.poll() is None, self.output
        self.facts = json.loads(self.ready_file.read_text())
        return self

    def until_said(self, text: str) -> None:
        until(lambda: text in self.output, START_SECONDS, lambda: self.output)

    def stage_pid(self, kind: str) -> int:
        stages = self.facts["stages"]
        assert isinstance(stages, list)
        return int(next(stage["pid"] for stage in stages if stage["kind"] == kind))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 10.0) -> int:
        code = self._process.wait(timeout)
        self._reader.join(5.0)
        return code

    def family(self) -> list[psutil.Process]:
        """The supervisor's descendants, wrappers and stages alike."""
        return psutil.Process(self.pid).children(recursive=True)

    def end(self) -> None:
        family = self.family() if self._process.poll() is None else []
        self._process.kill()
        self._process.wait()
        for process in family:
            if process.is_running():
                process.kill()


def until(condition: Callable[[], bool], timeout: float, story: Callable[[], str] = str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, story()
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    """Ended, or zombies of a dead parent that nobody has reaped yet."""
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


Start = Callable[..., FakeInstance]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts instances, and ends them whatever the test left."""
    # pytest's own folders are too deep for ipc.
    folder = tmp_path_factory.mktemp("q")
    if len(str(folder)) > 50:
        pytest.skip("temporary directory too deep")
    instances: list[FakeInstance] = []

    def begin(*flags: str, cwd: Path | None = None, **behaviour: str) -> FakeInstance:
        instances.append(FakeInstance(folder, *flags, cwd=cwd, **behaviour))
        return instances[-1]

    yield begin
    for instance in instances:
        instance.end()


def test_it_serves_and_ends_without_a_trace(start: Start) -> None:
    instance = start().serving()
    family = instance.family()
    stages = instance.facts["stages"]
    assert isinstance(stages, list)
    assert [stage["kind"] for stage in stages] == list(STAGES)
    assert {stage["pid"] for stage in stages} == {process.pid for process in family}
    for stage in stages:
        assert psutil.Process(stage["pid"]).cmdline()[0] == stage["title"]
        assert os.getsid(stage["pid"]) == stage["pid"]
    assert psutil.Process(instance.pid).cmdline()[0] == "quintet supervisor"
    assert instance.facts["pid"] == instance.pid
    run_dir = Path(str(instance.facts["run_dir"]))
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert f"quintet serves fake on {instance.facts['address']}" in instance.output
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0
    assert gone(family)
    assert not list(instance.parent.iterdir())


@pytest.mark.parametrize("kind", STAGES)
def test_a_killed_stage_ends_the_instance(start: Start, kind: str) -> None:
    instance = start().serving()
    family = instance.family()
    began = time.monotonic()
    os.kill(instance.stage_pid(kind), signal.SIGKILL)
    assert instance.wait(5.0) == 1
    assert time.monotonic() - began < 4.0
    assert gone(family)
    assert f"quintet {kind} 0" in instance.output
    assert "was killed by SIGKILL" in instance.output
    if kind != "server":
        assert "streams end: quintet" in instance.output, "servers are told before they are stopped"
    assert not list(instance.parent.iterdir())


@pytest.mark.parametrize("kind", ["server", "worker"])
def test_a_stopped_stage_ends_the_instance(start: Start, kind: str) -> None:
    instance = start().serving()
    family = instance.family()
    began = time.monotonic()
    os.kill(instance.stage_pid(kind), signal.SIGSTOP)
    assert instance.wait(5.0) == 1
    assert time.monotonic() - began < 4.0
    assert "was stopped by a signal" in instance.output
    assert gone(family)


def test_a_stopped_stage_is_seen_behind_its_wrapper(start: Start) -> None:
    """The wrapper is the supervisor's child, so no SIGCHLD tells of it."""
    instance = start("--wrap", "worker=sh -c '\"$@\"; exit $?' wrapper").serving()
    family = instance.family()
    assert len(family) == 6
    os.kill(instance.stage_pid("worker"), signal.SIGSTOP)
    instance.until_said("quintet worker 0 rank 0 (pid")
    assert instance.wait(6.0) == 1
    assert "was stopped by a signal" in instance.output
    assert gone(family)


def test_a_hung_stage_ends_the_instance(start: Start) -> None:
    instance = start("--stall-timeout", "3", scheduler="hang")
    instance.until_said("quintet scheduler 0 is ready")
    assert instance.wait(15.0) == 1
    assert "quintet scheduler 0 (pid " in instance.output
    assert "hangs: no heartbeat came and no CPU time was used for --stall-timeout 3 s" in instance.output


def test_a_stage_that_dies_at_start_leaves_its_last_words(start: Start) -> None:
    instance = start(worker="exit-at-start")
    assert instance.wait() == 1
    assert "quintet worker 0 rank 0" in instance.output
    assert "ended with exit code 7 while starting" in instance.output
    assert "        weights are corrupt: model.safetensors" in instance.output.replace("supervisor:", "    ")
    assert not instance.ready_file.exists()
    assert not list(instance.parent.iterdir())


def test_a_stage_that_never_gets_ready_has_a_deadline(start: Start) -> None:
    instance = start("--startup-timeout", "3", tokenizer="never-ready")
    assert instance.wait(15.0) == 1
    assert "--startup-timeout 3 s (not ready: quintet tokenizer 0)" in instance.output


def test_another_schema_is_refused(start: Start) -> None:
    instance = start(detokenizer="other-schema")
    assert instance.wait() == 1
    assert "code changed on disk" in instance.output


def test_a_missing_wrapper_is_named(start: Start) -> None:
    instance = start("--wrap", "scheduler=no-such-profiler record --")
    assert instance.wait() == 1
    assert "'no-such-profiler' cannot be started: No such file or directory" in instance.output


def test_a_flood_of_output_blocks_nobody_and_keeps_its_end(start: Start) -> None:
    instance = start(tokenizer="flood").serving()
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0, instance.output[-2000:]
    assert sum("line 19999 " in line for line in instance.lines) == 1


def test_streams_finish_before_a_requested_end(start: Start) -> None:
    instance = start(server="busy").serving()
    began = time.monotonic()
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0
    assert time.monotonic() - began >= 1.0
    assert "drained" in instance.output


def test_sigterm_to_the_whole_group_still_drains(start: Start) -> None:
    """As service managers send it."""
    instance = start(server="busy").serving()
    for process in [*instance.family(), psutil.Process(instance.pid)]:
        process.send_signal(signal.SIGTERM)
    assert instance.wait() == 0
    assert "drained" in instance.output


def test_a_second_interrupt_does_not_wait_for_streams(start: Start) -> None:
    instance = start(server="never-drains").serving()
    instance.signal(signal.SIGINT)
    instance.until_said("draining: interrupted")
    began = time.monotonic()
    instance.signal(signal.SIGINT)
    assert instance.wait() == 0
    assert time.monotonic() - began < 4.0


def test_a_drain_has_a_timeout(start: Start) -> None:
    instance = start("--drain-timeout", "0.5", server="never-drains").serving()
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0
    assert "streams were still open after --drain-timeout 0.5 s" in instance.output


@pytest.mark.parametrize("way", ["direct", "stopped", "wrapped", "gil", "starting"])
def test_nobody_outlives_a_killed_supervisor(start: Start, way: str) -> None:
    """Also where stages are stopped, behind a wrapper, in native code with the GIL, or not ready yet."""
    match way:
        case "wrapped":
            # A wrapper that would outlive its stage.
            instance = start("--wrap", "worker=sh -c '\"$@\"; sleep 100' wrapper").serving()
        case "gil":
            instance = start(worker="hold-gil").serving()
            time.sleep(2.5)
        case "starting":
            instance = start(worker="never-ready")
            instance.until_said("quintet server 0 is ready")
        case _:
            instance = start().serving()
    family = instance.family()
    if way == "stopped":
        instance.signal(signal.SIGSTOP)  # first, or it would see them stop
        for process in family:
            process.suspend()
    instance.signal(signal.SIGKILL)
    instance.wait()
    until(lambda: gone(family), 5.0, lambda: str(family))
    assert len(list(instance.parent.iterdir())) == 1
    successor = start().serving()
    assert [str(path) for path in instance.parent.iterdir()] == [successor.facts["run_dir"]]


def test_a_taken_port_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        number = taken.getsockname()[1]
        instance = start("--port", str(number))
        assert instance.wait() == 2
    assert f"--port {number}: 127.0.0.1:{number} is taken by another process" in instance.output


def test_a_second_instance_on_the_port_is_refused_before_the_first_listens(start: Start) -> None:
    first = start().serving()
    second = start("--port", str(first.facts["port"]))
    assert second.wait() == 2
    assert "is taken by another process" in second.output


def test_files_in_the_working_directory_are_not_run(start: Start, tmp_path: Path) -> None:
    for name in ("server", "random", "scheduler", "worker", "proto", "engine", "fake_stage"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    instance = start(cwd=tmp_path).serving()
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0
    assert "the wrong module" not in instance.output


def test_an_unread_stderr_stops_nobody(tmp_path: Path) -> None:
    """A pipe that nobody reads is full soon; the instance serves, drains and ends."""
    folder = tmp_path
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fake_serve", "--port", "0", "--ready-file", str(ready)],
        env={**os.environ, "PYTHONPATH": str(FAKES), "QUINTET_FAKE": '{"tokenizer": "flood"}'},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        until(ready.exists, START_SECONDS)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_a_bad_ready_file_is_named_before_anything_starts(start: Start) -> None:
    instance = start("--ready-file", "/no/such/folder/ready.json")
    assert instance.wait() == 2
    assert "--ready-file /no/such/folder/ready.json: No such file or directory" in instance.output
    assert not list(instance.parent.iterdir())


def test_an_instance_that_does_not_come_up_says_why() -> None:
    with pytest.raises(
        InstanceError, match=r"exit code 2:\n(.*\n)*.*--data-parallel-size: data parallelism is not built yet"
    ):
        Instance.start(["--model", "demo", "--data-parallel-size", "2"])


def test_a_model_that_does_not_exist_ends_with_two() -> None:
    with pytest.raises(InstanceError, match=r"exit code 2:\n(.*\n)*.*/no/such/model"):
        Instance.start(["--model", "/no/such/model"])
