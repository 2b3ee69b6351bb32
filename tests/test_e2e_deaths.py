"""Kill, stop and drain a whole instance. The device is simulated: only processes matter here."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from engine.instance import Instance
from quintet_client import Client, QuintetError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

INNER = ("tokenizer", "scheduler", "worker", "detokenizer")


FLAGS = ["--model", str(Path(__file__).parents[1] / "scripts/shapes/llama-3.1-8b"), "--device", "sim:h200"]


@pytest.fixture
def ring() -> Iterator[Instance]:
    instance = Instance.start(FLAGS)
    yield instance
    instance.kill()


class Streams:
    """Open streams, read by threads until they end."""

    def __init__(self, address: str, count: int, tokens: int) -> None:
        self.ends: list[tuple[grpc.StatusCode | None, float, int]] = []
        self._started = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._read, args=(address, tokens)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._started.acquire(timeout=20)

    def _read(self, address: str, tokens: int) -> None:
        received = 0
        code = None
        with Client(address, timeout=60, retry=False) as client:
            try:
                for chunk in client.generate_stream([5, 6, 7], max_new_tokens=tokens, ignore_eos=True):
                    if received == 0:
                        self._started.release()
                    received += len(chunk.token_ids)
            except QuintetError as error:
                code = error.code
        self.ends.append((code, time.monotonic(), received))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def pids(instance: Instance) -> dict[str, int]:
    return {stage["title"].split()[1]: stage["pid"] for stage in instance.stages}


def assert_all_gone(instance: Instance, before: dict[str, int], within: float) -> None:
    end = time.monotonic() + within
    alive = set(before.values())
    while alive and time.monotonic() < end:
        alive = {p for p in alive if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE}
        time.sleep(0.05)
    assert not alive, f"still there: {alive}"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("stage", INNER)
def test_death_of_an_inner_stage_ends_everything_soon(ring: Instance, stage: str, how: signal.Signals) -> None:
    before = pids(ring)
    streams = Streams(ring.address, 4, tokens=1500)
    struck = time.monotonic()
    os.kill(before[stage], how)
    streams.join()
    for code, ended, _ in streams.ends:
        assert code is grpc.StatusCode.UNAVAILABLE
        assert ended - struck < 2.0
    assert ring.wait(10) not in (0, None)
    assert_all_gone(ring, before, 5)
    assert f"quintet {stage}" in ring.stderr_tail
    assert not Path(ring.run_dir).exists()


@pytest.mark.parametrize("stopped", [None, "worker", "server"])
def test_death_of_the_supervisor(ring: Instance, stopped: str | None) -> None:
    before = pids(ring)
    if stopped:
        os.kill(before[stopped], signal.SIGSTOP)
    os.kill(ring.pid, signal.SIGKILL)
    assert_all_gone(ring, before, 5)


def test_sigterm_under_load_lets_streams_finish(ring: Instance) -> None:
    streams = Streams(ring.address, 4, tokens=200)
    os.kill(ring.pid, signal.SIGTERM)
    streams.join()
    assert [(code, received) for code, _, received in streams.ends] == [(None, 200)] * 4
    assert ring.wait(20) == 0
    assert not Path(ring.run_dir).exists()


def test_a_second_instance_on_the_port_fails_clearly(ring: Instance) -> None:
    port = ring.address.rpartition(":")[2]
    with pytest.raises(Exception, match=f"{port}.*(in use|taken)"):
        Instance.start([*FLAGS, "--port", port])
