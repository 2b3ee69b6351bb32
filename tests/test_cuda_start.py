"""From options to a GPU worker: what is missing, what memory is left for the pool."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.cli import doctor
from engine.config import ServeConfig
from engine.documents import kv_bytes
from proto.cache import CacheGroups
from proto.messages import StepResult
from tests.cuda_cases import MODEL, ids_of, launch, options_of, plans, silent
from tests.flashinfer_double import simulate
from tests.worker_stage import Surroundings
from worker.cuda.memory import Measured, pool_pages, used_memory
from worker.cuda.start import start
from worker.device import DeviceError
from worker.loader.model import resolve_dtype

ROOT = Path(__file__).parent.parent
GPU = torch.cuda.is_available()
needs_none = pytest.mark.skipif(GPU, reason="this machine has a GPU")


# --------------------------------------------------------------------------- without a GPU


@needs_none
def test_without_cuda_the_device_says_what_is_missing() -> None:
    with pytest.raises(DeviceError, match=r"^--device cuda: .*; `quintet doctor` lists what is missing$"):
        start(options_of("cuda"), silent)


@needs_none
@pytest.mark.slow
def test_serve_ends_at_once_with_one_line_and_nothing_is_left_running(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "engine.cli", "serve", "--model", "demo", "--device", "cuda", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("quintet: --device cuda: ")
    assert "quintet doctor" in done.stderr
    assert not [p for p in psutil.Process().children(recursive=True) if p.is_running()]
    assert not list(tmp_path.iterdir())


@needs_none
@pytest.mark.slow
def test_the_worker_alone_ends_with_one_line_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    surroundings = Surroundings(tmp_path_factory.mktemp("w"), options_of("cuda"))
    try:
        _, said = surroundings.process.communicate(timeout=60)
        assert surroundings.process.returncode == 2
        assert said.count("--device cuda: ") == 1
        assert "Traceback" not in said
    finally:
        surroundings.close()


def test_what_is_lacking_is_named_and_a_compiler_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        doctor.Check("cuda", "GPU 0", "ok", "H200"),
        doctor.Check("cuda", "nvcc", "note", "not in PATH"),
        doctor.Check("cuda", "flashinfer-python", "note", "not installed; pip install it"),
    ]
    monkeypatch.setattr(doctor, "_gpu", lambda: iter(found))
    assert doctor.lacking_for_cuda() == ["flashinfer-python: not installed; pip install it"]


def test_defaults_of_the_device() -> None:
    config = ServeConfig(model="demo", device="cuda", enforce_eager=True)
    assert (config.batch_seqs, config.batch_tokens, kv_bytes(config), config.simulated) == (256, 4096, None, False)
    assert config.needs_weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_auto_is_the_checkpoints_dtype_where_the_device_is_fast(dtype: str) -> None:
    assert resolve_dtype("auto", dtype, {}) is getattr(torch, dtype)
    assert resolve_dtype("auto", dtype, {dtype: "float16"}) is torch.float16
    assert resolve_dtype(dtype, "bfloat16", {dtype: "float16"}) is getattr(torch, dtype)


# --------------------------------------------------------------------------- memory


def test_the_pool_gets_what_the_rest_leaves() -> None:
    measured = Measured(total=1000, before=300, attention=50, peak=100, graphs=20)
    options = options_of("cuda", num_pages=None, gpu_memory_utilization=0.9)
    one = groups_of(full=2, windowed=0, layer_page=5)
    # 900 - 300 - 50 - 100 - 20 = 430: 43 pages of 10, of which one is the dummy page.
    assert pool_pages(options, measured, one) == (42, 0)
    assert pool_pages(options_of("cuda", num_pages=7), measured, one) == (7, 0)
    assert pool_pages(options_of("cuda", num_pages=None, kv_bytes=205), measured, one) == (20, 0)
    alone = groups_of(full=0, windowed=2, layer_page=5)
    assert pool_pages(options, measured, alone) == (0, 42)
    assert pool_pages(options_of("cuda", num_pages=7), measured, alone) == (0, 7)
    # Sequences of four windows: 10 and 5 pages, 10 × 2 × 1 + 5 × 3 × 1 = 35 bytes. 430 less a dummy page of each: 425.
    both = groups_of(full=2, windowed=3, layer_page=1)
    assert pool_pages(options, measured, both) == (425 * 10 // 35, 425 * 5 // 35)
    assert pool_pages(options_of("cuda", num_pages=20), measured, both) == (20, 10)


def groups_of(full: int, windowed: int, layer_page: int) -> CacheGroups:
    return CacheGroups(full, windowed, 10 if windowed else 0, page_size=4, layer_page=layer_page, max_len=64)


def test_a_pool_without_room_says_what_fills_the_memory() -> None:
    measured = Measured(total=2 * 10**9, before=10**9, attention=2 * 10**8, peak=5 * 10**8, graphs=10**8)
    options = options_of("cuda", num_pages=None, gpu_memory_utilization=0.9)
    with pytest.raises(DeviceError) as failed:
        pool_pages(options, measured, groups_of(full=2, windowed=0, layer_page=10**7 // 2))
    for words in (
        "0.9 of 2.00 GB",
        "take 1.00 GB",
        "buffers 0.20 GB",
        "steps 0.50 GB",
        "graphs 0.10 GB",
        "10000000 bytes",
    ):
        assert words in str(failed.value)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.emulation
def test_the_share_is_used_and_not_exceeded(eager: bool) -> None:
    """Of the emulated GPU's 1 GiB, through a prefill of the largest step and decodes of all rows."""
    share = 0.22
    with simulate(0) as gpu:
        options = options_of("cuda", num_pages=None, gpu_memory_utilization=share, enforce_eager=eager)
        device = start(options, silent)
        device.reset(1)
        allowed = int(torch.cuda.mem_get_info()[1] * share)
        page = MODEL.kv_bytes_per_token(4) * options.page_size
        torch.cuda.reset_peak_memory_stats()
        for plan in plans(6, 3):
            result = launch(gpu, device, plan).wait()
            assert isinstance(result, StepResult)
            assert len(ids_of(result)) == 6
        assert used_memory() <= torch.cuda.max_memory_allocated() <= allowed
        assert used_memory() > allowed - max(64 * page, allowed // 50)
        facts = device.facts
        assert facts.num_pages > 1000
        assert (facts.device, facts.dtype, facts.max_model_len) == ("cuda", "float32", 64)


def test_a_pool_that_holds_less_than_the_model_could_says_so() -> None:
    with simulate(0):
        options = options_of("cuda", num_pages=9)
        assert start(options, silent).facts.max_model_len == 36
