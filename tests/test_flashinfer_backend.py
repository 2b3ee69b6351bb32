"""The FlashInfer backend by itself: fp8 K/V, padding, what a launch costs, refusals, and the ops beside it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.flashinfer_cases import (
    BUCKETS,
    DOUBLE,
    MAX_LENGTH,
    NUM_PAGES,
    PAGE,
    VOCAB,
    GpuRunner,
    ReferenceRunner,
    Traffic,
    attention_shape,
    compare,
    config,
)
from tests.flashinfer_double import simulate
from worker.cpu.reference_attention import rotate
from worker.cpu.reference_ops import ReferenceOps
from worker.cuda import flashinfer_api
from worker.cuda.attention import KvFormat, Limits, pad_indptr
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.flashinfer_api import FlashInferError
from worker.cuda.ops import CudaOps
from worker.cuda.pinned import PinnedRing
from worker.device import DeviceError
from worker.layers.attention import Rotation
from worker.steps.batch import StepBatch

LIMITS = Limits(max_rows=8, max_tokens=256, max_pages_per_row=MAX_LENGTH // PAGE, workspace_bytes=1 << 12)


def decode_batches(count: int, traffic: Traffic) -> list[StepBatch]:
    found: list[StepBatch] = []
    while len(found) < count:
        batch = traffic.step()
        if batch.decode_rows == len(batch.slots):
            found.append(batch)
    return found


@pytest.mark.parametrize("scales", [(), ((0.02, 0.03), (0.05, 0.02))])
def test_fp8_cache_is_close(scales: tuple[tuple[float, float], ...]) -> None:
    """e4m3 keeps 3 bits of mantissa: an error of up to 1/16 in each of K and V, which attention averages."""
    with DOUBLE(seed=2):
        reference = ReferenceRunner(config("llama"), DOUBLE.dtype)
        gpu = GpuRunner(reference, KvFormat(torch.float8_e4m3fn, scales))
        worst = compare(reference, gpu, Traffic(np.random.default_rng(3)), 12, tolerance=3.0)
        assert worst > 0.01  # it is fp8 that is computed with
        assert gpu.attention.groups[0].keys.dtype == torch.float8_e4m3fn


def test_fp8_error_is_that_of_rounding_the_cache() -> None:
    """The same logits as the reference that rounds K and V itself: nothing else is lost."""
    scales = ((0.02, 0.03), (0.05, 0.02))

    def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    with DOUBLE(seed=2):
        reference = ReferenceRunner(config("llama"), DOUBLE.dtype)
        run = reference.attention.run

        def run_rounded(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
        ) -> torch.Tensor:
            assert rotation is not None
            rotate(q, rotation)
            rotate(k, rotation)
            return run(layer, q, rounded(k, scales[layer][0]), rounded(v, scales[layer][1]))

        reference.attention.run = run_rounded  # type: ignore[method-assign]
        gpu = GpuRunner(reference, KvFormat(torch.float8_e4m3fn, scales))
        compare(reference, gpu, Traffic(np.random.default_rng(3)), 12, tolerance=2e-2)


def test_deterministic_takes_tensor_cores_and_no_split() -> None:
    with DOUBLE(seed=4):
        reference = ReferenceRunner(config("qwen3"), DOUBLE.dtype)
        gpu = GpuRunner(reference, deterministic=True)
        compare(reference, gpu, Traffic(np.random.default_rng(4)), 10, DOUBLE.tolerance)
        decode = gpu.attention._decode[0].eager
        assert decode._use_tensor_cores
        assert decode._shape.disable_split_kv


def test_padding_touches_no_live_page() -> None:
    """Bit for bit: only the batch's own slots are written, and live rows do not see what padding rows hold."""
    with simulate(seed=5) as gpu_device, torch.inference_mode():
        reference = ReferenceRunner(config("mistral"), DOUBLE.dtype)
        gpu = GpuRunner(reference)
        attention = gpu.attention.groups[0]
        traffic = Traffic(np.random.default_rng(6))
        for _ in range(6):
            gpu.eager(traffic.step())
        for batch in decode_batches(4, traffic):
            rows = len(batch.slots)
            before = [gpu_device.peek(attention.keys), gpu_device.peek(attention.values)]
            written = {(slot // PAGE, slot % PAGE) for slot in batch.kv_slots.tolist()}
            for bucket in [b for b in BUCKETS if b > rows]:
                seen = []
                for filler in (0.0, 1e4):
                    for pages, copy in zip((attention.keys, attention.values), before, strict=True):
                        pages.copy_(copy.to("cuda"))
                        pages[:, attention.dummy_page] = filler
                    gpu.padding_id = int(filler) % (VOCAB - 1)
                    logits = gpu.replay(batch, bucket).wait()
                    after = [gpu_device.peek(pages) for pages in (attention.keys, attention.values)]
                    seen.append((logits, *(pages[:, :NUM_PAGES] for pages in after)))
                    for now, then in zip(after, before, strict=True):
                        changed = (now != then).any(-1).any(-1)[:, :NUM_PAGES].nonzero().tolist()
                        assert {(page, offset) for _, page, offset in changed} == written
                assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_launch_never_waits_when_the_device_keeps_up() -> None:
    """Plan and replay: no hidden wait, no pageable copy; one graph, and no kernel beside it but copies."""
    with simulate(seed=8) as gpu_device, torch.inference_mode():
        reference = ReferenceRunner(config("gemma2"), DOUBLE.dtype)
        gpu = GpuRunner(reference)
        for bucket in reversed(BUCKETS):
            gpu.capture(bucket)
        traffic = Traffic(np.random.default_rng(6))
        for _ in range(6):
            gpu.eager(traffic.step())
        for batch in decode_batches(6, traffic):
            gpu.stream.synchronize()
            with gpu_device.timeline.launch_path() as account:
                gpu.replay(batch, 8)
            assert account.waits == []
            assert len(account.replays) == 1
            assert {name.split(".")[0] for name in account.eager} <= {"copy host to device", "copy device to host"}


def test_a_ring_waits_only_when_it_is_depth_steps_behind() -> None:
    with simulate(seed=1) as gpu:
        ring = PinnedRing(depth=3, words=4)
        buffers = []
        with gpu.timeline.launch_path() as account:
            for step in range(3):
                turn = ring.begin()
                buffers.append(turn.put(np.array([step], np.int32)))
                torch.empty(1, dtype=torch.int32, device="cuda").copy_(buffers[-1], non_blocking=True)
                ring.end()
            assert account.waits == []
        assert len({b.data_ptr() for b in buffers}) == 3
        assert [int(b) for b in buffers] == [0, 1, 2]
        ring.begin()
        assert not gpu.timeline.current.items or ring._turns[ring.index].event.marker.done  # type: ignore[attr-defined]


def test_padding_rows_have_a_page_each() -> None:
    batch = replace(Traffic(np.random.default_rng(0)).step(), kv_indptr=np.array([0, 2, 5], np.int32))
    assert pad_indptr(batch, 4).tolist() == [0, 2, 5, 6, 7]
    assert pad_indptr(batch, 2).tolist() == [0, 2, 5]
    assert pad_indptr(None, 2).tolist() == [0, 1, 2]
    assert pad_indptr(batch, 4).dtype == np.int32


# --------------------------------------------------------------------------- refusals


def test_what_is_refused_is_named() -> None:
    with simulate():
        shape = attention_shape(config("llama"), torch.float32)
        api = flashinfer_api.library()
        flashinfer_api.replace(replace(api, head_dims=frozenset({64, 128, 256})))
        with pytest.raises(DeviceError, match="head_dim 16 is not one of 64, 128, 256"):
            FlashInferAttention(shape, LIMITS)
        flashinfer_api.replace(replace(api, dtypes=frozenset({torch.bfloat16, torch.float16})))
        with pytest.raises(DeviceError, match="dtype float32 is not bfloat16 or float16"):
            FlashInferAttention(shape, LIMITS)
        flashinfer_api.replace(api)
        with pytest.raises(DeviceError, match="ALiBi together with a soft cap"):
            FlashInferAttention(replace(shape, alibi=True, logits_soft_cap=5.0), LIMITS)
        attention = FlashInferAttention(shape, LIMITS)
        batch = Traffic(np.random.default_rng(0)).step()
        assert batch.decode_rows < len(batch.slots)
        with pytest.raises(ValueError, match=r"chunks in a decode graph of 8 rows"):
            attention.plan_graph(batch, 8)
        with pytest.raises(ValueError, match="0 rows in a graph of 16; 8 is the most"):
            attention.plan_graph(None, 16)


def test_without_flashinfer_its_absence_is_named_and_nothing_else_breaks() -> None:
    """In a process of its own: a blocked import stands for a machine without CUDA."""
    program = """
import sys
sys.modules["flashinfer"] = None
sys.modules["triton"] = None
import worker.cuda.flashinfer, worker.cuda.ops, worker.cpu.start
from worker.cuda.flashinfer_api import FlashInferError
try:
    worker.cuda.ops.CudaOps()
except FlashInferError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "device cuda needs FlashInfer 0.7.4" in done.stdout
    assert "pip install 'quintet-llm[cuda]'" in done.stdout


def test_another_flashinfer_is_recognised() -> None:
    with pytest.raises(FlashInferError, match="has no _int_workspace_buffer, _pin_memory_int_workspace_buffer; use"):
        flashinfer_api.check_wrapper(object())


# --------------------------------------------------------------------------- ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_are_the_references(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    atol, rtol = (1e-5, 1e-5) if dtype == torch.float32 else (0.04, 0.02)
    x, weight, bias, wide = random(5, 16), random(16), random(16), random(5, 32)
    logits = torch.randn(6, 8, generator=generator)
    with simulate(seed=3) as gpu:
        ops, reference = CudaOps(), ReferenceOps()

        def check(got: torch.Tensor, expected: torch.Tensor) -> None:
            assert got.dtype == expected.dtype
            torch.testing.assert_close(gpu.peek(got), expected, atol=atol, rtol=rtol)

        there = {name: t.to("cuda") for name, t in {"x": x, "w": weight, "b": bias, "wide": wide}.items()}
        check(ops.rms_norm(there["x"], there["w"], 1e-5), reference.rms_norm(x, weight, 1e-5))
        wider = weight.float() + 1e-3  # as Gemma's norms keep it, beside activations in bfloat16
        check(ops.rms_norm(there["x"], wider.to("cuda"), 1e-5), reference.rms_norm(x, wider, 1e-5))
        delta = random(5, 16)
        for norm in (weight, wider):
            added, normed = ops.add_rms_norm(x.to("cuda"), delta.to("cuda"), norm.to("cuda"), 1e-5)
            expected_sum, expected_norm = reference.add_rms_norm(x, delta, norm, 1e-5)
            assert torch.equal(gpu.peek(added), expected_sum)
            check(normed, expected_norm)
        check(ops.silu_mul(there["wide"]), reference.silu_mul(wide))
        check(ops.gelu_mul(there["wide"]), reference.gelu_mul(wide))
        check(ops.gelu(there["x"]), reference.gelu(x))
        check(ops.soft_cap(there["x"], 2.0), reference.soft_cap(x, 2.0))
        check(ops.layer_norm(there["x"], there["w"], there["b"], 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
        matrix = random(7, 16)
        check(ops.linear(there["x"], ops.pack(matrix.to("cuda"))), reference.linear(x, reference.pack(matrix)))
        for renormalise in (False, True):
            expected = reference.route(logits, 3, renormalise)
            routes = ops.route(logits.to("cuda"), 3, renormalise)
            assert gpu.peek(routes.experts).tolist() == expected.experts.tolist()
            check(routes.weights, expected.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_weight_is_kept_narrow(dtype: torch.dtype) -> None:
    """The head's float32 copy of a 16-bit weight: half the memory, the same logits in float32."""
    x, weight = torch.randn(3, 16).to(dtype), torch.randn(5, 16).to(dtype)
    with simulate() as gpu:
        ops = CudaOps()
        packed = ops.pack(weight.float().to("cuda"))
        assert packed.dtype == dtype
        logits = ops.linear(x.float().to("cuda"), packed)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(gpu.peek(logits), x.float() @ weight.float().T)
        exact = torch.randn(5, 16)
        assert ops.pack(exact.to("cuda")).dtype == torch.float32
