"""GPU kernels of our own, in Triton; imported through `worker.attention.flashinfer_api` only.

One program for each token and head, each with one vector of head_dim elements: simple rather than fast to the last
microsecond. Tests on a CPU use a double with the same functions; these have not been run on a GPU yet.
"""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

FP8_MAX = 448.0  # of float8_e4m3fn


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate(  # type: ignore[no-untyped-def]
    x, positions, cos, sin, row_stride, head_stride, half: tl.constexpr, width: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, width)
    inside = i < half
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * half + i, mask=inside, other=0.0)
    s = tl.load(sin + position * half + i, mask=inside, other=0.0)
    at = x + row * row_stride + head * head_stride + i
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(at + half, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [N, heads, d] in place, its first T rows; positions [T] int32, cos and sin [positions, d/2] float32."""
    half = x.shape[2] // 2
    grid = (positions.shape[0], x.shape[1])
    _rotate[grid](x, positions, cos, sin, x.stride(0), x.stride(1), half, triton.next_power_of_2(half))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_kv(  # type: ignore[no-untyped-def]
    k,
    v,
    slots,
    keys,
    values,
    k_row,
    k_head,
    v_row,
    v_head,
    k_inverse,
    v_inverse,
    limit,
    heads,
    size: tl.constexpr,
    width: tl.constexpr,
    quantise: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, width)
    inside = i < size
    to = (tl.load(slots + row).to(tl.int64) * heads + head) * size + i
    key = tl.load(k + row * k_row + head * k_head + i, mask=inside, other=0.0)
    value = tl.load(v + row * v_row + head * v_head + i, mask=inside, other=0.0)
    if quantise:
        key = tl.minimum(tl.maximum(key.to(tl.float32) * k_inverse, -limit), limit)
        value = tl.minimum(tl.maximum(value.to(tl.float32) * v_inverse, -limit), limit)
    tl.store(keys + to, key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + to, value.to(values.dtype.element_ty), mask=inside)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Put k and v [T, kv heads, d] into slots [T] int32 of contiguous pages [pages, page size, kv heads, d].

    float8 pages get value / scale, cut to what e4m3 holds; others get the value.
    """
    heads, size = k.shape[1], k.shape[2]
    _write_kv[(k.shape[0], heads)](
        k,
        v,
        slots,
        keys,
        values,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        1.0 / k_scale,
        1.0 / v_scale,
        FP8_MAX,
        heads,
        size,
        triton.next_power_of_2(size),
        keys.dtype != k.dtype,
    )
