"""--kv-cache-dtype fp8 on the emulated GPU: a quarter of float32's bytes, and logits close to its."""

import pytest
import torch

from engine.cli.estimate import estimate
from tests.flashinfer_double import simulate
from tests.test_cuda_device import MODEL, make_device, options_of, plans, play, silent
from tests.test_worker_process import Surroundings
from worker.cuda.load import resolve_kv_dtype
from worker.cuda.start import start
from worker.device import DeviceError
from worker.loop import facts_of


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
        assert device._step.attention.keys.dtype is device._step.attention.values.dtype is wanted
    return found


@pytest.mark.parametrize("eager", [False, True])
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


def test_the_pool_holds_four_times_as_much_and_facts_and_estimate_agree() -> None:
    pages = {}
    with simulate(0):
        for kv_cache_dtype, named in (("auto", "float32"), ("fp8_e4m3", "fp8")):
            options = options_of("cuda", kv_cache_dtype=kv_cache_dtype, num_pages=None, kv_bytes=1 << 16)
            facts = facts_of(start(options, silent), options)
            sizes = estimate(
                MODEL, dtype="float32", kv_cache_dtype=named, page_size=options.page_size, sequence_length=64
            )
            assert facts.kv_bytes_per_token == sizes.kv_bytes_per_token
            assert facts.num_pages == (1 << 16) // sizes.page_bytes
            assert facts.dtype == "float32"
            pages[kv_cache_dtype] = facts.num_pages
    assert pages["fp8_e4m3"] == 4 * pages["auto"]


def test_what_k_and_v_are_kept_in() -> None:
    assert resolve_kv_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert resolve_kv_dtype("fp8_e4m3", torch.bfloat16) is torch.float8_e4m3fn
    with pytest.raises(DeviceError, match="--kv-cache-dtype fp8_e5m2 is neither auto nor fp8_e4m3"):
        resolve_kv_dtype("fp8_e5m2", torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim:h200"])
def test_a_worker_without_fp8_ends_with_one_line(device: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    surroundings = Surroundings(tmp_path_factory.mktemp("w"), options_of(device, kv_cache_dtype="fp8_e4m3"))
    try:
        _, said = surroundings.process.communicate(timeout=60)
        assert surroundings.process.returncode == 2
        assert f"--kv-cache-dtype fp8_e4m3: --device {device} keeps K/V as --dtype" in said
        assert "Traceback" not in said
    finally:
        surroundings.close()
