"""The commands around models: `python -m engine.models`, `quintet estimate`, `quintet doctor`."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cli import estimate, main
from engine.models import demo
from proto.model import ModelConfig, ModelManifest
from tests import tiny_gguf

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_1_8B))
    return str(path)


# python -m engine.models


def run_models(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "engine.models", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_manifest_is_written_as_json(tmp_path: Path) -> None:
    model, out = tiny_gguf.write(tmp_path / "m.gguf"), tmp_path / "manifest.json"
    done = run_models(str(model), "--out", str(out))
    assert done.returncode == 0, done.stderr
    manifest = msgspec.json.decode(out.read_bytes(), type=ModelManifest)
    assert (manifest.name, manifest.weight_files) == (str(model), (str(model),))


def test_a_model_that_cannot_be_used_ends_with_two_and_one_line(tmp_path: Path) -> None:
    out = tmp_path / "manifest.json"
    done = run_models(str(tmp_path / "no.gguf"), "--out", str(out))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "no.gguf") in done.stderr
    assert not out.exists()


def test_weights_are_optional(llama_8b: str, tmp_path: Path) -> None:
    out = tmp_path / "manifest.json"
    assert run_models(llama_8b, "--out", str(out)).returncode == 2
    assert run_models(llama_8b, "--out", str(out), "--no-weights").returncode == 0
    assert msgspec.json.decode(out.read_bytes(), type=ModelManifest).weight_format == "none"


def test_docstrings_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    test_the_manifest_is_written_as_json(tmp_path)


def test_no_model_is_read_with_torch(tmp_path: Path) -> None:
    model = tiny_gguf.write(tmp_path / "m.gguf")
    code = f"import sys; from engine.models import prepare; prepare({str(model)!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for heavy in ("torch", "transformers", "safetensors", "huggingface_hub"):
        assert f"'{heavy}'" not in done.stdout


# quintet estimate


def run_estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_llama_3_1_8b_by_hand(capsys: pytest.CaptureFixture[str], llama_8b: str) -> None:
    """32 layers × 8 heads × 128 × 2 × 2 bytes; 8.03 × 10^9 parameters, as its model card says."""
    sizes = run_estimate(capsys, llama_8b, "--memory", "24GiB", "--sequence-length", "8192")
    assert sizes["kv_bytes_per_token"] == 131072
    assert sizes["parameters"] == 8_030_261_248
    assert sizes["weight_bytes"] == 16_060_522_496
    assert sizes["page_bytes"] == 2 << 20
    assert (sizes["pages_per_sequence"], sizes["sequence_bytes"]) == (512, GIB)
    # 24 GiB × 0.9 = 23 192 823 398 bytes, less the weights: 7 132 300 902, in pages of 2 097 152
    assert sizes["kv_pool_bytes"] == 7_132_300_902
    assert (sizes["pages"], sizes["pool_tokens"], sizes["sequences"]) == (3400, 54400, 6)


@pytest.mark.parametrize(
    ("words", "per_token", "weight_bytes"),
    [
        (["--dtype", "float32"], 262144, 32_121_044_992),
        (["--kv-cache-dtype", "fp8"], 65536, 16_060_522_496),
        (["--dtype", "float", "--kv-cache-dtype", "fp8_e4m3"], 65536, 32_121_044_992),
    ],
)
def test_dtypes(
    capsys: pytest.CaptureFixture[str], llama_8b: str, words: list[str], per_token: int, weight_bytes: int
) -> None:
    sizes = run_estimate(capsys, llama_8b, *words)
    assert (sizes["kv_bytes_per_token"], sizes["weight_bytes"]) == (per_token, weight_bytes)
    assert sizes["pages"] is None


def test_layers_behind_a_window_keep_pages_of_the_window_only() -> None:
    """One layer of two has a window of 100: 8 pages, or 9 with one just begun."""
    config = ModelConfig(
        family="gemma3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_position_embeddings=512,
        windows=(100, 0),
        dtype="float32",
    )
    sizes = estimate.estimate(config, sequence_length=400, memory=10**8)
    assert (sizes.pages_per_sequence, sizes.window_pages_per_sequence) == (25, 9)
    assert sizes.sequence_bytes == (25 + 9) * 16 * 256  # a token takes 2 × 2 × 16 × 4 bytes in a layer
    assert sizes.kv_pool_bytes is not None
    # For sequences of 400 tokens, four windows, memory is divided.
    assert sizes.sequences == sizes.kv_pool_bytes // sizes.sequence_bytes
    assert "25 pages and 9 pages of layers with a window" in estimate._table(sizes)
    shorter = estimate.estimate(config, sequence_length=90, max_model_len=90)
    assert (shorter.pages_per_sequence, shorter.window_pages_per_sequence) == (6, 0)


def test_a_sequence_takes_whole_pages(capsys: pytest.CaptureFixture[str], llama_8b: str) -> None:
    sizes = run_estimate(
        capsys,
        llama_8b,
        "--memory",
        "24GiB",
        "--gpu-memory-utilization",
        "1",
        "--sequence-length",
        "65",
        "--page-size",
        "64",
    )
    assert sizes["pages_per_sequence"] == 2
    assert sizes["pages"] == (24 * GIB - 16_060_522_496) // (64 * 131072)
    assert sizes["sequences"] == sizes["pages"] // 2


def test_the_table_for_people(capsys: pytest.CaptureFixture[str], llama_8b: str) -> None:
    assert main(["estimate", llama_8b, "--memory", "24GiB", "--sequence-length", "8192"]) == 0
    out = capsys.readouterr().out
    for words in ("131,072 bytes", "14.96 GiB", "1.00 GiB, 512 pages", "3,400 pages (54,400 tokens)", "6 at once"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "12GiB"], ["--memory", "12.00 GiB", "10.80 GiB", "14.96 GiB"]),
        (["--max-model-len", "200000"], ["--max-model-len", "200000", "131072"]),
        (["--max-model-len", "4096", "--sequence-length", "4097"], ["--sequence-length", "4097", "4096"]),
    ],
)
def test_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str], llama_8b: str, words: list[str], told: list[str]
) -> None:
    assert main(["estimate", llama_8b, *words]) == 1
    err = capsys.readouterr().err
    for word in told:
        assert word in err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["estimate", str(tmp_path / "no.json")]) == 1
    assert "no.json" in capsys.readouterr().err


def test_the_model_may_be_named_as_for_serve(capsys: pytest.CaptureFixture[str], llama_8b: str) -> None:
    assert run_estimate(capsys, "--model", llama_8b) == run_estimate(capsys, llama_8b)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_kv_dtypes_are_those_that_a_device_has(capsys: pytest.CaptureFixture[str], llama_8b: str, dtype: str) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", llama_8b, "--kv-cache-dtype", dtype])
    assert f"--kv-cache-dtype: must be one of auto, fp8, fp8_e4m3; got '{dtype}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--gpu-memory-utilization", "1.1"], ["--gpu-memory-utilization", "nan"], ["--page-size", "0"]]
)
def test_flags_out_of_range(llama_8b: str, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", llama_8b, *words])
    assert caught.value.code == 2


def test_parameters_are_those_of_transformers() -> None:
    """Every optional weight at once, counted by the model's own code."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
    }
    common: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "qkv_bias": True,
        "out_bias": True,
    }
    llama = LlamaForCausalLM(LlamaConfig(**shape, mlp_bias=True))
    ours = ModelConfig(family="llama", mlp_bias=True, **common)
    assert ours.parameters == sum(p.numel() for p in llama.parameters())
    qwen = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    ours = ModelConfig(family="qwen3", qk_norm=True, tie_word_embeddings=True, **common)
    assert ours.parameters == sum(p.numel() for p in qwen.parameters())


# quintet doctor


def run_doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *words])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def finding(report: dict[str, Any], name: str) -> dict[str, str]:
    found: dict[str, str] = next(check for check in report["checks"] if check["name"] == name)
    return found


def test_a_machine_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_doctor(capsys)
    assert (code, report["cpu"]) == (0, True)
    assert {"python", "quintet-llm", "torch", "grpcio", "cores", "nvcc", "cache", "run directory", "port"} <= {
        check["name"] for check in report["checks"]
    }
    assert finding(report, "demo model")["state"] == "note"
    assert main(["doctor"]) == 0
    assert "The CPU backend can run." in capsys.readouterr().out


def test_a_missing_package_is_named_with_its_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    code, report = run_doctor(capsys)
    assert (code, report["cpu"]) == (1, False)
    assert finding(report, "torch")["state"] == "fail"
    assert "quintet-llm[cpu]" in finding(report, "torch")["detail"]
    assert main(["doctor"]) == 1
    assert "The CPU backend cannot run: see torch." in capsys.readouterr().out


def test_a_foreign_proto_is_found_before_it_breaks_imports(tmp_path: Path) -> None:
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "__init__.py").write_text("raise RuntimeError('foreign')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.cli", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"{tmp_path / 'proto' / '__init__.py'} belongs to another distribution" in done.stdout


def test_a_taken_port_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, report = run_doctor(capsys, "--port", str(taken.getsockname()[1]))
    assert code == 0
    assert finding(report, "port")["state"] == "note"


def test_the_demo_model_is_checked_by_digest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"weights" * 1000
    monkeypatch.setattr(demo, "FILE_SIZE", len(content))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(content).hexdigest())
    path = demo.demo_path()
    path.parent.mkdir(parents=True)

    path.write_bytes(content)
    assert finding(run_doctor(capsys)[1], "demo model")["state"] == "ok"
    path.write_bytes(content[:-1])
    assert "incomplete" in finding(run_doctor(capsys)[1], "demo model")["detail"]
    path.write_bytes(b"W" + content[1:])
    code, report = run_doctor(capsys)
    assert code == 1
    assert "damaged" in finding(report, "demo model")["detail"]


def test_a_cache_that_is_not_writable_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINTET_CACHE", "/proc/nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    code, report = run_doctor(capsys)
    assert code == 1
    assert "QUINTET_CACHE" in finding(report, "cache")["detail"]
