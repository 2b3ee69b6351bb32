"""The GPU kit, as far as a machine without a GPU can run it."""

import ast
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engine.cli import doctor
from proto.model import ModelConfig
from scripts.gpu import check, make_wheels, modules, speed, triton_ahead
from tests.flashinfer_cases import DOUBLE, GPU, config
from tests.flashinfer_double import simulate
from worker.cuda import flashinfer_api
from worker.cuda.flashinfer import CUDA_CORE_GROUPS, TENSOR_CORE_GROUP
from worker.models import FAMILIES

ROOT = Path(__file__).parent.parent


@pytest.mark.emulation
def test_every_timing_runs_on_the_double() -> None:
    scale = speed.GRAIN
    with simulate(seed=1):
        decoded = list(speed.decode(scale, bandwidth=1e9))
        assert [row["batch"] for row in decoded] == list(scale.batches)
        assert all(row["roofline_ms"] > 0 and row["step_ms"] > 0 for row in decoded)
        assert 0 <= speed.admissions(scale)["device_idle"] <= 1
        assert speed.prefill(scale, rate=1e9)["tokens"] == scale.prompt
        served = speed.throughput(scale)
        assert served["requests"] == scale.requests
        assert scale.requests * scale.lengths[0] <= served["tokens_out"] <= scale.requests * scale.lengths[1]


@pytest.mark.emulation
def test_more_rows_than_a_step_can_prefill_are_timed_too() -> None:
    """The first of them decode while the last are prefilled, and so need more room than those have."""
    scale = replace(speed.GRAIN, batches=(60,), steps=1)
    with simulate(seed=1):
        (decoded,) = speed.decode(scale, bandwidth=1e9)
    assert decoded["context"] > scale.context + 20


def test_parts_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "prefill", lambda scale, rate: {"rate": rate})
    with simulate():
        report = check.run(DOUBLE, speed.GRAIN, only=["prefill"])
        assert list(report["parts"]) == ["what the machine can do", "prefill"]
        assert report["parts"]["prefill"]["result"]["rate"] > 0
        with pytest.raises(SystemExit, match="no parts: speed; there are: families against the reference, "):
            check.run(DOUBLE, speed.GRAIN, only=["speed"])


def test_rooflines_count_the_real_models() -> None:
    assert speed._weights(speed.LLAMA_8B) == pytest.approx(8.03e9, rel=0.001)
    assert speed._weights(speed.QWEN3_06B) == pytest.approx(0.596e9, rel=0.001)


@pytest.mark.emulation
def test_a_part_that_fails_is_named_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise AssertionError("logits differ by 9")

    monkeypatch.setattr(check, "families", broken)
    for name in ("graphs", "fp8"):
        monkeypatch.setattr(check, name, lambda *_: {"largest_difference": 0.125})
    for name in ("decode", "admissions", "throughput", "prefill"):
        monkeypatch.setattr(speed, name, lambda *_: {})
    told: list[str] = []
    with simulate():
        report = check.run(DOUBLE, speed.GRAIN, tell=lambda found, name: told.append(list(found["parts"])[-1]))
    assert report["failed"] == ["families against the reference"]
    assert report["machine"]["simulated"] is True
    text = [line for name in told for line in check.lines_of(name, report)]
    assert "    error AssertionError: logits differ by 9" in text
    assert "    largest_difference 0.125" in text
    assert check.verdict(report).endswith("failed: families against the reference")
    assert told == list(report["parts"])  # each as soon as it was over


def test_without_a_gpu_the_check_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["check"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        check.main()
    assert "torch sees no GPU" in capsys.readouterr().err


def test_the_slim_wheel_holds_what_is_reached(tmp_path: Path) -> None:
    source, aot, wheels = tmp_path / "source", tmp_path / "aot", tmp_path / "wheels"
    files = {
        "flashinfer/decode.py": "kept",
        "flashinfer/cake_fmha.py": "kept, as an import loads it",
        "flashinfer/cake_other.py": "dropped",
        "flashinfer/data/csrc/batch_decode.jinja": "kept",
        "flashinfer/data/csrc/cake_x.cu": "dropped",
        "flashinfer/data/include/big.cuh": "dropped",
        "flashinfer_python-0.7.4.dist-info/METADATA": "kept",
        "flashinfer_python-0.7.4.dist-info/RECORD": "made anew",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (aot / "decode").mkdir(parents=True)
    (aot / "decode/decode.so").write_bytes(b"machine code")
    wheels.mkdir()
    wheel = make_wheels.slim(source, aot, {"flashinfer/cake_fmha.py"}, wheels)
    assert wheel.name == "flashinfer_python-0.7.4-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = archive.read("flashinfer_python-0.7.4.dist-info/RECORD").decode().splitlines()
    kept = {name for name, text in files.items() if text.startswith("kept")}
    record_name = "flashinfer_python-0.7.4.dist-info/RECORD"
    assert names == {*kept, "flashinfer/data/aot/decode/decode.so", record_name}
    assert {line.split(",")[0] for line in record} == names


def test_the_doctor_says_what_cuda_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here fails a machine without CUDA; a machine with another FlashInfer is told so."""
    installed = {"flashinfer-python": "0.6.13", "triton": "3.6.0"}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: installed.get(name) or real(name))
    checks = {found.name: found for found in doctor._gpu()}
    assert {found.state for found in checks.values()} <= {"ok", "note"}
    assert checks["flashinfer-python"].detail == "0.6.13; the worker is written for 0.7.4"
    text = doctor._text(list(checks.values()), [], ["nvcc", "flashinfer-python"])
    assert text.endswith("Device cuda cannot run: this machine lacks flashinfer-python.\n")
    assert doctor._text(list(checks.values()), [], ["nvcc"]).endswith("Device cuda can run.\n")
    assert doctor._FLASHINFER == flashinfer_api.VERSION == make_wheels.FLASHINFER.split("==")[1]


def kernels_of(model: ModelConfig) -> set[str]:
    """The modules that a model's attention asks for in bfloat16."""
    needed = set()
    group = model.num_heads // model.num_kv_heads
    decode = "decode" if group < TENSOR_CORE_GROUP and group in CUDA_CORE_GROUPS else "fa2"
    for window in set(model.windows) or {0}:
        features = [word for word, on in (("window", window), ("cap", model.attention_soft_cap)) if on]
        name = "alibi" if model.alibi else "-".join(features) or "plain"
        kinds = {decode, "fa2"} if model.alibi else {decode, "fa2", "fa3"}
        needed |= {f"{kind}-{model.head_dim}-{name}" for kind in kinds}
    return needed


def test_every_kernel_that_the_check_needs_is_made() -> None:
    """One that is not there stops a machine without nvcc in the middle of its minutes."""
    made = set(modules.names())
    for family in FAMILIES:
        assert kernels_of(config(family, GPU)) <= made
    for model in (speed.LLAMA_8B, speed.QWEN3_06B):
        assert kernels_of(model) <= made
    assert {"norm", "silu", "gelu", f"fa2-{GPU.head_dim}-fp8"} <= made


def test_every_function_of_our_kernels_is_compiled_ahead() -> None:
    tree = ast.parse((ROOT / "worker/cuda/kernels.py").read_text())
    public = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    assert {name for name, _ in triton_ahead.launches()} == public
