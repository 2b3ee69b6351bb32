"""--deterministic on the emulated GPU: what FlashInfer and cuBLAS are asked must not depend on who is in a step.

That they then give the same bits is for a GPU to show: each start with the flag checks it there.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models import prepare
from proto.messages import StepResult
from tests.builders import i32, make_plan, make_row
from tests.cuda_cases import MODEL, SIZES, both_groups, ids_of, make_device, options_of, plans, play, script, silent
from tests.flashinfer_double import simulate
from tests.flashinfer_double.library import BatchDecodeWithPagedKVCacheWrapper as Decode
from tests.flashinfer_double.library import BatchPrefillWithPagedKVCacheWrapper as Prefill
from tests.layer_cases import worker_options
from tests.tiny_models import make_tiny
from worker.cpu.start import start as start_cpu
from worker.cuda.ops import ROWS, CudaOps
from worker.cuda.start import start
from worker.cuda.tiles import cut_chunks, most_rows, tokens_of_a_tile
from worker.device import Deferred, DeviceError
from worker.steps.prompts import step

GROUP = MODEL.num_heads // MODEL.num_kv_heads


# --------------------------------------------------------------------------- what is asked of the libraries


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.emulation
def test_no_plan_splits_or_looks_at_neighbours(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    heights: list[int] = []
    for wrapper in (Decode, Prefill):

        def plan(self: Any, first: torch.Tensor, *args: Any, _plan: Any = wrapper.plan, **options: Any) -> None:
            asked.append(options)
            if isinstance(self, Prefill):
                heights.extend((np.diff(first.numpy()) * GROUP).tolist())
            else:
                assert self._use_tensor_cores
            _plan(self, first, *args, **options)
            assert self._backend == "fa2"

        monkeypatch.setattr(wrapper, "plan", plan)
    with simulate(1) as gpu:
        device = make_device(deterministic=True, enforce_eager=eager)
        late = make_row(5, list(range(1, 20)), [26, 28, 30, 27, 29, 31])
        chunk = both_groups(make_plan(step=5, admits=(late,), chunks=i32(5, 19, 1)))
        play(gpu, device, [*plans(3, 4), chunk])
    assert len(asked) > 10
    assert all(options["disable_split_kv"] for options in asked)
    assert max(heights) == 16  # the lowest tile, whatever a step's mean
    assert sum(heights) >= (9 + 19) * GROUP


@pytest.mark.emulation
def test_every_product_has_the_same_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = set()
    product = CudaOps._product

    def spy(self: CudaOps, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        rows.add(x.shape[0])
        assert x.is_contiguous()
        return product(self, x, packed)

    monkeypatch.setattr(CudaOps, "_product", spy)
    with simulate(1) as gpu:
        play(gpu, make_device(deterministic=True), plans(5, 3))
    assert rows == {ROWS}


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 3])
def test_products_are_those_of_all_rows_at_once(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 24, generator=generator), torch.randn(40, 24, generator=generator)
    with simulate(0) as gpu:
        found = gpu.peek(CudaOps(deterministic=True).linear(x.to("cuda"), weight.to("cuda")))
    torch.testing.assert_close(found, x @ weight.T)


# --------------------------------------------------------------------------- cutting chunks


@given(st.data())
def test_cut_chunks_are_the_same_tokens_over_the_same_pages(data: st.DataObject) -> None:
    size, most = data.draw(st.sampled_from([4, 16])), data.draw(st.integers(1, 16))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=5))
    batch = step([np.arange(n, dtype=np.int32) for _, n in rows], size, [start for start, _ in rows])
    decodes = data.draw(st.integers(0, next((i for i, (_, n) in enumerate(rows) if n > 1), len(rows))))
    batch.kv_indices[:] = batch.kv_indices[::-1].copy()
    batch = type(batch)(**{**{f: getattr(batch, f) for f in batch.__slots__}, "decode_rows": decodes})
    cut = cut_chunks(batch, most, size)
    if decodes == len(rows):
        assert cut is batch
        return
    lengths = np.diff(cut.qo_indptr)
    assert lengths.min() >= 1
    assert lengths.max() <= most
    assert lengths[:decodes].tolist() == [1] * decodes
    assert len(cut.slots) <= most_rows(len(rows), len(batch.token_ids), most, size)
    assert cut.qo_indptr[-1] == len(batch.token_ids)
    for row, (first, end) in enumerate(zip(cut.qo_indptr[:-1], cut.qo_indptr[1:], strict=True)):
        of = int(np.searchsorted(batch.qo_indptr, first, side="right")) - 1
        assert end <= batch.qo_indptr[of + 1]
        assert cut.slots[row] == batch.slots[of]
        pages = cut.kv_indices[cut.kv_indptr[row] : cut.kv_indptr[row + 1]]
        assert pages.tolist() == batch.kv_indices[batch.kv_indptr[of] :][: len(pages)].tolist()
        assert (len(pages) - 1) * size + cut.last_page_len[row] == batch.positions[end - 1] + 1
        assert 1 <= cut.last_page_len[row] <= size


@pytest.mark.parametrize(("heads", "kv_heads", "most"), [(32, 32, 16), (32, 8, 4), (14, 2, 2), (40, 8, 3), (64, 1, 1)])
def test_tokens_of_a_tile(heads: int, kv_heads: int, most: int) -> None:
    config = msgspec.structs.replace(MODEL, num_heads=heads, num_kv_heads=kv_heads)
    assert tokens_of_a_tile(config) == most
    assert tokens_of_a_tile(msgspec.structs.replace(config, alibi=True)) == 1


# --------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "bloom", "gemma2"])
@pytest.mark.emulation
def test_tokens_are_the_cpus(family: str, tmp_path: Path) -> None:
    manifest = prepare(str(make_tiny(tmp_path, family)))
    options = worker_options(manifest, device="reference", deterministic=True, **SIZES)
    runner = start_cpu(options, silent)
    runner.reset(1)
    expected = [runner.step(plan) for plan in script(manifest.config)]
    with simulate(1):
        device = start(worker_options(manifest, device="cuda", deterministic=True, **SIZES), silent)
        device.reset(1)
        for deferred, wanted in zip([device.launch(plan) for plan in script(manifest.config)], expected, strict=True):
            assert isinstance(deferred, Deferred)
            assert isinstance(wanted, StepResult)
            assert ids_of(deferred.wait()) == ids_of(wanted)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.emulation
def test_logits_of_a_request_are_the_same_bits_alone_and_in_company(kv_cache_dtype: str) -> None:
    options = {"deterministic": True, "dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    logits, tokens = [], []
    for rows in (1, 5):
        with simulate(2) as gpu:
            device = make_device(**options)
            tokens.append([ids[0] for ids in play(gpu, device, plans(rows, 8))])
            logits.append(gpu.peek(device._step.logits)[0])
    assert tokens[0] == tokens[1]
    assert torch.equal(*logits)


@pytest.mark.emulation
def test_the_pool_is_measured_with_the_flag_too() -> None:
    with simulate(0) as gpu:
        options: dict[str, Any] = {"num_pages": None, "gpu_memory_utilization": 0.22, "deterministic": True}
        device = start(options_of("cuda", **options), silent)
        device.reset(1)
        assert device.facts.num_pages > 1000
        assert [len(ids) for ids in play(gpu, device, plans(6, 3))] == [6, 6, 6]


@pytest.mark.parametrize("tokens", [24, 200])
def test_a_gpu_that_breaks_the_law_is_refused(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = CudaOps.linear

    def by_rows(self: CudaOps, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return linear(self, x, packed) * (1 + 1e-6 * x.shape[0])

    monkeypatch.setattr(CudaOps, "linear", by_rows)
    with simulate(0), pytest.raises(DeviceError, match=r"--deterministic: logits in one batch differ .* on this GPU"):
        start(options_of("cuda", deterministic=True, max_num_batched_tokens=tokens), silent)
    with simulate(0):  # without the flag nothing was promised
        start(options_of("cuda", enforce_eager=True, max_num_batched_tokens=tokens), silent)
