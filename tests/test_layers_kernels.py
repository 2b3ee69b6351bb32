"""Arithmetic of the cpu device against the reference's, and against exact values."""

from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
import torch

from worker.cpu import gemm
from worker.cpu.attention import rotate
from worker.cpu.gemm import GemmRule, find_rule
from worker.cpu.jit import exp, narrow, widen
from worker.cpu.ops import CpuOps, bits
from worker.cpu.reference_attention import rotate as reference_rotate
from worker.cpu.reference_ops import ReferenceOps
from worker.layers.attention import Rotation
from worker.layers.gemm_shape import GemmShape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # relative
DTYPES = list(TOLERANCE)
RULE = GemmRule(onednn=False, multiple=1, most={(40, 24): 1})


@numba.njit
def exp_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


@numba.njit
def narrow_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = narrow(x[i], out)


@numba.njit
def widen_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = widen(x[i])


def test_exp_is_within_two_ulp() -> None:
    x = np.linspace(-87, 88, 1_000_003, dtype=np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    edges = np.array([-np.inf, -1000.0, 0.0, 1000.0, np.nan], np.float32)
    out = np.empty_like(edges)
    exp_all(edges, out)
    assert 0 < out[0] == out[1] < 2e-38
    assert out[2] == 1
    assert np.isfinite(out[3])
    assert np.isnan(out[4])


def test_bfloat16_conversions_equal_torch() -> None:
    """Ties to even, overflow to infinity, denormals, NaN; and back, for every bfloat16."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator).to(torch.int32)
    halfway = (patterns & ~0xFFFF) | 0x8000
    values = torch.cat([patterns, halfway, halfway + 1, halfway - 1]).view(torch.float32)
    out = torch.empty(len(values), dtype=torch.bfloat16)
    narrow_all(values.numpy(), bits(out))
    expected = values.bfloat16()
    assert torch.equal(torch.isnan(out), torch.isnan(values))
    settled = ~torch.isnan(values)
    assert torch.equal(out[settled].view(torch.int16), expected[settled].view(torch.int16))
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    back = np.empty(len(everything), np.float32)
    widen_all(bits(everything), back)
    assert np.array_equal(back.view(np.int32), everything.float().view(torch.int32).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 33, 576])
def test_row_kernels_equal_the_reference(dtype: torch.dtype, size: int) -> None:
    cpu, reference = CpuOps(RULE, 1), ReferenceOps()
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(7, 2 * size, generator=generator) * 4).to(dtype)
    weight = torch.randn(2 * size, generator=generator).to(dtype)
    close = partial(torch.testing.assert_close, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=TOLERANCE[dtype])
    close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    close(cpu.silu_mul(x), reference.silu_mul(x))
    q = torch.randn(7, 3, 16, generator=generator).to(dtype)
    angle = torch.rand(50, 8, generator=generator) * 6
    positions = torch.tensor([3, 49, 0, 7, 7], dtype=torch.int32)  # two rows are padding: left alone
    rotated, expected = q.clone(), q.clone()
    rotation = Rotation(positions, angle.cos(), angle.sin())
    rotate(rotated, rotation)
    reference_rotate(expected, rotation)
    close(rotated, expected)
    assert torch.equal(rotated[5:], q[5:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kernels_do_not_see_other_rows(dtype: torch.dtype) -> None:
    """Bitwise, for sizes with and without a vector's remainder, on one thread and on two."""
    generator = torch.Generator().manual_seed(1)
    for size in (40, 576, 577):
        x = torch.randn(300, 2 * size, generator=generator).to(dtype)
        weight = torch.randn(2 * size, generator=generator).to(dtype)
        one, two = CpuOps(RULE, 1), CpuOps(RULE, 2)
        for i in (0, 1, 150, 299):
            row = x[i : i + 1].clone()
            assert torch.equal(one.rms_norm(row, weight, 1e-5)[0], two.rms_norm(x, weight, 1e-5)[i])
            assert torch.equal(one.silu_mul(row)[0], two.silu_mul(x)[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_holds_for_row_counts_that_were_not_tried(dtype: torch.dtype) -> None:
    shapes = [GemmShape(40, 24, dtype, 512), GemmShape(96, 200, dtype, 512)]
    rule = find_rule(shapes)
    generator = torch.Generator().manual_seed(2)
    for shape in shapes:
        weight = torch.randn(shape.out_features, shape.in_features, generator=generator).to(dtype)
        packed = rule.pack(weight)
        x = torch.randn(1200, shape.in_features, generator=generator).to(dtype)
        whole = rule(x[: 1200 // rule.multiple * rule.multiple], packed)
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(
            whole.double(), exact[: len(whole)], atol=0.2 if dtype == torch.bfloat16 else 1e-4, rtol=0
        )
        for count in (22, 26, 34, 74, 138, 202, 598):
            count = -(-count // rule.multiple) * rule.multiple
            start = 3 * rule.multiple
            assert torch.equal(rule(x[start : start + count], packed), whole[start : start + count])


def test_the_rule_rejects_kernels_that_depend_on_the_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that changes at 20 rows, and one that changes at 100, from which no padding saves."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = x.double() @ weight.double().T
        return (exact if x.shape[0] < at_rows else exact * (1 + 1e-6)).float()

    def no_such_kernel(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no oneDNN")

    monkeypatch.setattr(gemm, "_pack_onednn", no_such_kernel)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    shapes = [GemmShape(64, 512, torch.float32, 128)]
    at_rows = 20  # agreeing from 20 rows on: calls of 32
    assert find_rule(shapes) == GemmRule(onednn=False, multiple=32, most={(64, 512): 128})
    at_rows = 100  # no multiple agrees with 128 rows: tiles of 8
    assert find_rule(shapes) == GemmRule(onednn=False, multiple=8, most={(64, 512): 8})
