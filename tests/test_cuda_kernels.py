"""Our Triton kernels against plain arithmetic: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

from worker.cpu.reference_attention import rotate
from worker.layers.attention import Rotation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter has numpy's dtypes only.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1"),
]


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    from worker.cuda import kernels as cuda_kernels

    return cuda_kernels


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "count"), [(5, 2), (8, 3), (128, 8)])
def test_routing(kernels: Any, experts: int, count: int, renormalise: bool) -> None:
    logits = random(9, experts)
    logits[0], logits[4, 1] = 0.0, float("nan")
    chosen, weights = (x.cpu() for x in kernels.route(logits, count, renormalise))
    fine = [row for row in range(9) if row != 4]
    expected = logits.cpu()[fine].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert chosen[fine].tolist() == expected.tolist()
    kept = logits.cpu()[fine].softmax(-1).gather(1, expected)
    close(weights[fine], kept / kept.sum(-1, keepdim=True) if renormalise else kept, torch.float32)
    assert bool(weights[4].isnan().all())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < experts


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "count", "width", "features"), [(1, 5, 2, 32, 48), (7, 8, 3, 48, 80), (90, 3, 2, 144, 130)]
)
def test_grouped_products_and_their_weighted_sum(
    kernels: Any, tokens: int, experts: int, count: int, width: int, features: int, dtype: torch.dtype, rows: int
) -> None:
    x, weight = random(tokens, width, dtype=dtype), random(experts, features, width, dtype=dtype, seed=1)
    chosen, weights = kernels.route(random(tokens, experts, seed=2), count, True)
    ordered, order = chosen.flatten().sort()
    numbers = torch.arange(experts, dtype=torch.int32, device=DEVICE)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    parts = kernels.grouped_product(x, weight, ends, order, count, rows)
    each = [x[pair // count].double() @ weight[expert].double().T for pair, expert in enumerate(chosen.flatten())]
    close(parts / width**0.5, torch.stack(each) / width**0.5, dtype)
    total = kernels.weighted_sum(parts, weights)
    close(total, (parts.view(tokens, count, -1).double() * weights.double()[..., None]).sum(1), torch.float32)
    again = kernels.grouped_product(parts, weight.mT.contiguous(), ends, order, 1, rows)
    each = [part.double() @ weight[expert].double() for part, expert in zip(parts, chosen.flatten(), strict=True)]
    close(again / features, torch.stack(each) / features, dtype)


@pytest.mark.parametrize("fp8", [False] if INTERPRETED else [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (7, 1, 24)])
def test_rotation_and_writing(
    kernels: Any, heads: int, kv_heads: int, size: int, dtype: torch.dtype, fp8: bool
) -> None:
    qkv = random(5, heads + 2 * kv_heads, size, dtype=dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    positions = torch.tensor([3, 29, 0, 7, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([5, 0, 31, 8, 9], dtype=torch.int32, device=DEVICE)
    angles = random(30, size // 2, seed=3)
    rotation = Rotation(positions, angles.cos(), angles.sin())
    turned_q, turned_k = q.clone(), k.clone()
    rotate(turned_q, rotation)
    rotate(turned_k, rotation)
    keys = torch.zeros(2, 16, kv_heads, size, dtype=torch.float8_e4m3fn if fp8 else dtype, device=DEVICE)
    values = torch.zeros_like(keys)
    k_scale, v_scale = (0.5, 2.0) if fp8 else (1.0, 1.0)
    before = k.clone()

    def check(expected_keys: torch.Tensor) -> None:
        for pages, wanted, scale in ((keys, expected_keys, k_scale), (values, v, v_scale)):
            flat = pages.flatten(0, 1).float() * scale
            expected = torch.zeros_like(flat)
            expected[slots.long()] = wanted.float()
            torch.testing.assert_close(flat, expected, rtol=0.07 if fp8 else 0.01, atol=0.01)

    kernels.rotate_and_write(q, positions, rotation.cos, rotation.sin, k, v, slots, keys, values, k_scale, v_scale)
    close(q, turned_q, dtype)
    assert torch.equal(k, before)
    check(turned_k)
    kernels.write_kv(k, v, slots, keys, values, k_scale, v_scale)
    check(k)
