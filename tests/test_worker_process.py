"""The worker as a process of its own: a test plays supervisor and scheduler."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from proto.messages import Desync, Reset, Stop
from tests.builders import i32, make_plan, make_row, make_worker_options
from tests.worker_stage import ROOT, Surroundings

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")  # a short name: ipc paths end at 107 bytes


@pytest.fixture
def simulated(run_dir: Path) -> Iterator[Surroundings]:
    """A worker of 4 ms steps."""
    surroundings = Surroundings(run_dir, make_worker_options(device="sim:h200,launch=4e-3", num_pages=64))
    yield surroundings
    surroundings.close()


def test_simulated_worker_answers_at_the_pace_of_its_device(simulated: Surroundings) -> None:
    """Two plans in flight, as a scheduler keeps them: steps of 4 ms, none answered early.

    That late sleeps do not add up is shown on a clock of its own, in test_worker_simulated. Here others may take
    the CPU.
    """
    facts = simulated.facts()
    assert (facts.num_pages, facts.page_size, facts.device) == (64, 4, "sim:h200,launch=4e-3")
    assert "torch" not in Path(f"/proc/{simulated.process.pid}/maps").read_text()
    simulated.worker.send(Reset(epoch=1))
    begin = time.monotonic()
    simulated.worker.send(make_plan(admits=(make_row(0, [1], list(range(10))),), chunks=i32(0, 1, 1)))
    for step in range(2, 32):
        simulated.worker.send(make_plan(step=step, decode_slots=i32(0) if step == 2 else None))
        result = simulated.result()
        assert result.step == step - 1
        assert result.device_ns == pytest.approx(4_000_000, abs=10_000)
        assert time.monotonic() - begin >= 0.004 * result.step
    assert simulated.result().step == 31
    assert time.monotonic() - begin < 0.124 + 0.5  # sleeps that end late must not add up
    counters = {"steps": 0.0}
    while counters["steps"] < 31:
        counters = simulated.counters()
    assert counters["tokens"] == 31
    assert counters["device_busy_seconds"] == pytest.approx(0.124, rel=0.01)
    assert counters["device_busy_share"] > 0.8


def test_a_lost_plan_is_told_and_stop_ends_the_process(simulated: Surroundings) -> None:
    simulated.facts()
    simulated.worker.send(Reset(epoch=5))
    simulated.worker.send(make_plan())
    refusal = simulated.receive(simulated.scheduler, Desync)
    assert refusal == Desync(epoch=1, step=1, expected_epoch=5, expected_previous=0)
    simulated.worker.send(Stop())
    assert simulated.process.wait(5) == 0


def test_sigterm_ends_a_worker_that_was_started_by_hand(simulated: Surroundings) -> None:
    simulated.facts()
    simulated.process.send_signal(signal.SIGTERM)
    assert simulated.process.wait(5) == 0


def test_a_contradictory_plan_ends_the_process_with_its_reason(simulated: Surroundings) -> None:
    simulated.facts()
    simulated.worker.send(Reset(epoch=1))
    simulated.worker.send(make_plan(decode_slots=i32(3)))
    _, words = simulated.process.communicate(timeout=10)
    assert simulated.process.returncode == 4
    assert "plan 1 of epoch 1: decodes slot 3, which holds no request" in words


@pytest.mark.parametrize(
    ("device", "backend", "words"),
    [
        ("sim:h300", "auto", "--device sim:h300: there is no such GPU"),
        ("sim:custom,bandwidth=1e12,flops=1e14,memory=1", "auto", "leave no page of KV cache"),
        ("sim:h200", "numba", "--attention-backend numba: --device sim:h200 computes no attention"),
        ("cpu", "flashinfer", "--attention-backend flashinfer: --device cpu offers auto, numba, reference"),
    ],
)
def test_a_device_that_cannot_be_ends_the_start_in_one_line(
    run_dir: Path, device: str, backend: str, words: str
) -> None:
    surroundings = Surroundings(run_dir, make_worker_options(device=device, attention_backend=backend))
    try:
        _, errors = surroundings.process.communicate(timeout=30)
        assert surroundings.process.returncode == 2
        assert words in errors
        assert len(errors.splitlines()) == 1
    finally:
        surroundings.close()


def test_weights_that_cannot_be_read_end_the_start_and_are_named(run_dir: Path) -> None:
    """K61, at the worker's end: the model's own tests cover every kind of damage."""
    options = make_worker_options()
    weights = run_dir / "model.safetensors"
    weights.write_bytes(b"\xff" * 100)
    manifest = msgspec.structs.replace(
        options.manifest, source=str(run_dir), weight_format="safetensors", weight_files=(str(weights),)
    )
    surroundings = Surroundings(run_dir, msgspec.structs.replace(options, manifest=manifest))
    try:
        _, errors = surroundings.process.communicate(timeout=60)
        assert surroundings.process.returncode == 2, errors
        assert str(weights) in errors
        assert "Traceback" not in errors
    finally:
        surroundings.close()


@pytest.mark.parametrize("module", ["worker.cpu.self_test", "worker.cpu.start"])
def test_openmp_spins_as_briefly_as_we_say(module: str) -> None:
    """Whichever module imports torch first: OpenMP reads how long when it is loaded, and never again."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", f"import {module}"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stderr
    assert "GOMP_SPINCOUNT = '2000'" in said
