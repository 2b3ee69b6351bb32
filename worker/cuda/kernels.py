"""GPU kernels of our own, in Triton; imported through `worker.cuda.flashinfer_api` only.

Simple rather than fast to the last microsecond. Tests on a CPU use a double with the same functions;
tests/test_cuda_kernels.py runs these on a GPU, or in Triton's interpreter. They compile for sm_90, but none has run on
a GPU yet.
"""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

FP8_MAX = 448.0  # of float8_e4m3fn


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _put(to, value, inverse, limit, inside, quantise: tl.constexpr):  # type: ignore[no-untyped-def]
    if quantise:
        value = tl.minimum(tl.maximum(value.to(tl.float32) * inverse, -limit), limit)
    tl.store(to, value.to(to.dtype.element_ty), mask=inside)


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
    _put(keys + to, key, k_inverse, limit, inside, quantise)
    _put(values + to, value, v_inverse, limit, inside, quantise)


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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _turn(at, cos, sin, half, inside):  # type: ignore[no-untyped-def]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    positions,
    cos,
    sin,
    slots,
    keys,
    values,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    k_inverse,
    v_inverse,
    limit,
    heads,
    kv_heads,
    half: tl.constexpr,
    width: tl.constexpr,
    quantise: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, width)
    inside = i < half
    angle = tl.load(positions + row).to(tl.int64) * half + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if head < heads:
        at = q + row * q_row + head * q_head + i
        a, b = _turn(at, c, s, half, inside)
        tl.store(at, a.to(q.dtype.element_ty), mask=inside)
        tl.store(at + half, b.to(q.dtype.element_ty), mask=inside)
    else:
        head -= heads
        a, b = _turn(k + row * k_row + head * k_head + i, c, s, half, inside)
        to = (tl.load(slots + row).to(tl.int64) * kv_heads + head) * 2 * half + i
        _put(keys + to, a, k_inverse, limit, inside, quantise)
        _put(keys + to + half, b, k_inverse, limit, inside, quantise)
        value = v + row * v_row + head * v_head + i
        low = tl.load(value, mask=inside, other=0.0)
        high = tl.load(value + half, mask=inside, other=0.0)
        _put(values + to, low, v_inverse, limit, inside, quantise)
        _put(values + to + half, high, v_inverse, limit, inside, quantise)


def rotate_and_write(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Rotate q [T, heads, d] in place, and put k, rotated, and v as `write_kv` does; k itself is left as it is.

    positions [T] int32, cos and sin [positions, d/2] float32.
    """
    heads, kv_heads, half = q.shape[1], k.shape[1], q.shape[2] // 2
    _rotate_and_write[(q.shape[0], heads + kv_heads)](
        q,
        k,
        v,
        positions,
        cos,
        sin,
        slots,
        keys,
        values,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        1.0 / k_scale,
        1.0 / v_scale,
        FP8_MAX,
        heads,
        kv_heads,
        half,
        triton.next_power_of_2(half),
        keys.dtype != k.dtype,
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _route(  # type: ignore[no-untyped-def]
    logits,
    chosen,
    weights,
    experts,
    count: tl.constexpr,
    renormalise: tl.constexpr,
    width: tl.constexpr,
    k: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, width)
    inside = e < experts
    values = tl.load(logits + row * experts + e, mask=inside, other=float("-inf"))
    masses = tl.where(inside, tl.exp(values - tl.max(values, 0)), 0.0)
    masses = masses / tl.sum(masses, 0)
    values = tl.where(values == values, values, float("-inf"))  # NaN must not lead out of the row
    place = tl.arange(0, k)
    ids = tl.zeros([k], tl.int32)
    kept = tl.zeros([k], tl.float32)
    for choice in tl.static_range(count):
        best = tl.argmax(values, 0)
        ids = tl.where(place == choice, best, ids)
        kept = tl.where(place == choice, tl.sum(tl.where(e == best, masses, 0.0), 0), kept)
        values = tl.where(e == best, float("-inf"), values)
    if renormalise:
        kept = kept / tl.sum(kept, 0)
    tl.store(chosen + row * count + place, ids, mask=place < count)
    tl.store(weights + row * count + place, kept, mask=place < count)


def route(logits: torch.Tensor, count: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of router logits [N, experts] float32: experts [N, count] int32 and weights float32, as `Ops.route`."""
    rows, experts = logits.shape
    chosen = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    width, k = triton.next_power_of_2(experts), triton.next_power_of_2(count)
    _route[(rows,)](logits, chosen, weights, experts, count, renormalise, width, k)
    return chosen, weights


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _grouped_product(  # type: ignore[no-untyped-def]
    x,
    weight,
    ends,
    order,
    out,
    x_row,
    experts,
    out_features,
    in_features,
    repeat,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    width: tl.constexpr,
):
    # Which expert's rows this tile has: all tiles of one expert, then all of the next.
    tile = tl.program_id(0)
    e = tl.arange(0, width)
    end = tl.load(ends + e, mask=e < experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    tiles = tl.where(e < experts, tl.cdiv(end - start, rows), 0)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - behind + tiles) * rows, 0), 0)
    at = first + tl.arange(0, rows)
    inside = at < tl.sum(tl.where(mine, end, 0), 0)
    pair = tl.load(order + at, mask=inside, other=0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    real = column < out_features
    i = tl.arange(0, depth)
    a = x + (pair // repeat)[:, None] * x_row + i[None, :]
    b = weight + expert.to(tl.int64) * out_features * in_features + column[None, :] * in_features + i[:, None]
    total = tl.zeros([rows, columns], tl.float32)
    for done in range(0, in_features, depth):
        left = i < in_features - done
        of_x = tl.load(a + done, mask=inside[:, None] & left[None, :], other=0.0)
        of_weight = tl.load(b + done, mask=left[:, None] & real[None, :], other=0.0)
        total = tl.dot(of_x, of_weight, total)
    to = out + pair[:, None] * out_features + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, order: torch.Tensor, repeat: int, rows: int
) -> torch.Tensor:
    """out[pair] = x[pair // repeat] × weight[expert]ᵀ for the pairs of each expert: [P, out].

    x [P / repeat, in], weight [experts, out, in]; `order` [P] int64 are the pairs sorted by expert, of which expert e
    has those before ends[e] [experts] int32. Each is read and written in its own row; tiles are of `rows` rows.
    """
    pairs = len(order)
    experts, out_features, in_features = weight.shape
    out = torch.empty(pairs, out_features, dtype=x.dtype, device=x.device)
    used = min(pairs, experts)
    tiles = min(pairs, (pairs + used * (rows - 1)) // rows)  # at most, however pairs are spread
    columns, depth = (64, 128) if rows == 16 else (128, 64)
    _grouped_product[(tiles, triton.cdiv(out_features, columns))](
        x,
        weight,
        ends,
        order,
        out,
        x.stride(0),
        experts,
        out_features,
        in_features,
        repeat,
        rows,
        columns,
        depth,
        triton.next_power_of_2(experts),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weighted_sum(  # type: ignore[no-untyped-def]
    parts, weights, out, size, count: tl.constexpr, width: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * width + tl.arange(0, width)
    inside = i < size
    total = tl.zeros([width], tl.float32)
    for choice in tl.static_range(count):
        pair = row * count + choice
        total += tl.load(weights + pair) * tl.load(parts + pair * size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, total, mask=inside)


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ over a row's k of weights [N, k] × parts [N × k, size], in their order: [N, size] float32."""
    rows, count = weights.shape
    size = parts.shape[1]
    out = torch.empty(rows, size, dtype=torch.float32, device=parts.device)
    width = min(triton.next_power_of_2(size), 1024)
    _weighted_sum[(rows, triton.cdiv(size, width))](parts, weights, out, size, count, width)
    return out
