"""--kv-cache-dtype fp8 on the emulated GPU: a quarter of float32's bytes, and logits close to its."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cli.estimate import estimate
from engine.models import prepare
from proto.cache import CacheGroups
from proto.config import WorkerOptions
from tests.cuda_cases import MODEL, attention_of, make_device, options_of, plans, play, silent
from tests.flashinfer_double import simulate
from tests.layer_cases import worker_options
from tests.tiny_models import make_tiny
from tests.worker_stage import Surroundings
from worker.cpu.start import start as start_cpu
from worker.cuda.start import start
from worker.device import DeviceError


def logits_of(kv_cache_dtype: str, eager: bool) -> list[torch.Tensor]:
    """Of three rows: after a step of prompts, and after a decode step behind it."""
    found = []
    with simulate(3) as gpu:
        device = make_device(kv_cache_dtype=kv_cache_dtype, enforce_eager=eager)
        for plan in plans(3, 2):
            device._step.state.last_tokens.fill_(9)  # the same in all runs, whatever was drawn
            play(gpu, device, [plan])
            found.append(gpu.peek(device._step.logits)[:3])
        wanted = torch.float8_e4m3fn if kv_cache_dtype == "fp8_e4m3" else torch.float32
        for pages in attention_of(device).groups.values():
            assert pages.keys.dtype is pages.values.dtype is wanted
    return found


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.emulation
def test_logits_are_close_to_those_of_a_full_cache(eager: bool) -> None:
    """e4m3 rounds each number of K and V by up to 1/16 of it; logits move by under a tenth of their spread."""
    for exact, rounded in zip(logits_of("auto", eager), logits_of("fp8_e4m3", eager), strict=True):
        error = (exact - rounded).abs().max()
        assert 0 < error < 0.1 * exact.std()


def test_tokens_come_and_graphs_give_those_of_eager_steps() -> None:
    tokens = []
    for eager in (False, True):
        with simulate(4) as gpu:
            tokens.append(play(gpu, make_device(kv_cache_dtype="fp8_e4m3", enforce_eager=eager), plans(5, 9)))
    assert tokens[0] == tokens[1]
    assert [len(ids) for ids in tokens[0]] == [5] * 9


@pytest.mark.emulation
def test_the_pool_holds_four_times_as_much_and_facts_and_estimate_agree() -> None:
    pages = {}
    with simulate(0):
        for kv_cache_dtype in ("auto", "fp8_e4m3"):
            options = options_of("cuda", kv_cache_dtype=kv_cache_dtype, num_pages=None, kv_bytes=1 << 16)
            facts = start(options, silent).facts
            sizes = estimate(
                MODEL, dtype="float32", kv_cache_dtype=kv_cache_dtype, page_size=options.page_size, sequence_length=64
            )
            assert facts.kv_bytes_per_token == sizes.kv_bytes_per_token
            groups = CacheGroups.of(MODEL, options.page_size, sizes.kv_bytes_per_token, 64)
            pages[kv_cache_dtype] = facts.num_pages, facts.window_pages
            assert pages[kv_cache_dtype] == groups.divide(1 << 16)
            assert facts.dtype == "float32"
    for wide, narrow in zip(pages["auto"], pages["fp8_e4m3"], strict=True):
        assert 4 * wide <= narrow < 4 * (wide + 1)


def with_scales(directory: Path, spelling: str, layers: int, value: float = 0.05) -> WorkerOptions:
    """A tiny model whose files hold scales of its first layers: `value` for K, twice that for V."""
    path = make_tiny(directory, "llama") / "model.safetensors"
    scales = {spelling.format(n, of): value * times for n in range(layers) for of, times in (("k", 1), ("v", 2))}
    save_file(load_file(path) | {name: torch.tensor(scale) for name, scale in scales.items()}, path)
    manifest = prepare(str(path.parent))
    return worker_options(
        manifest, device="cuda", dtype="float32", kv_cache_dtype="fp8_e4m3", num_pages=8, max_num_seqs=2
    )


@pytest.mark.parametrize(
    "spelling",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    ],
)
@pytest.mark.emulation
def test_a_checkpoints_own_scales_are_used(spelling: str, tmp_path: Path) -> None:
    options = with_scales(tmp_path, spelling, 3)
    with simulate(0):
        scales = attention_of(start(options, silent)).kv_format.scales
    assert torch.tensor(scales).tolist() == torch.tensor([[0.05, 0.1]] * 3).tolist()
    start_on_cpu(options)


def start_on_cpu(options: WorkerOptions) -> None:
    """Where K and V are not in fp8 the scales are passed over."""
    start_cpu(msgspec.structs.replace(options, device="cpu", kv_cache_dtype="auto"), silent)


@pytest.mark.parametrize(
    ("layers", "value", "said"), [(2, 0.05, "none for layer 2 k, layer 2 v"), (3, 0.0, "must be one positive number")]
)
def test_scales_that_do_not_fit_are_refused(layers: int, value: float, said: str, tmp_path: Path) -> None:
    options = with_scales(tmp_path, "model.layers.{}.self_attn.{}_scale", layers, value)
    with simulate(0), pytest.raises(DeviceError, match=said):
        start(options, silent)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim:h200"])
def test_a_worker_without_fp8_ends_with_one_line(device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    surroundings = Surroundings(tmp_path_factory.mktemp("w"), options_of(device, kv_cache_dtype="fp8_e4m3"))
    try:
        _, said = surroundings.process.communicate(timeout=60)
        assert surroundings.process.returncode == 2
        assert f"--kv-cache-dtype fp8_e4m3 needs --device cuda, got --device {device}" in said
        assert "Traceback" not in said
    finally:
        surroundings.close()
