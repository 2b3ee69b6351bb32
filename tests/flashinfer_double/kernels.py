"""Our Triton kernels (`worker.cuda.kernels`), computed when the simulated device gets there."""

import torch

from tests.flashinfer_double.memory import allocate, queue
from tests.flashinfer_double.strict import need

_FP8 = torch.float8_e4m3fn


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
    """As worker.cuda.kernels.rotate_and_write."""
    need(positions.dtype == slots.dtype == torch.int32, "positions and slots are int32")
    need(
        len({len(t) for t in (q, k, v, positions, slots)}) == 1,
        "q, k, v, positions and slots have a row for each token",
    )
    need(all(t.stride(-1) == 1 for t in (q, k, v)), "q, K and V dense in their last dimension")
    tensors = (q, k, v, positions, cos, sin, slots, keys, values)
    turned, raw_k, raw_v, at, c, s, places, to_k, to_v = (t.raw for t in tensors)  # type: ignore[attr-defined]

    def work() -> None:
        need(bool(((at >= 0) & (at < c.shape[0])).all()), "a position is outside the tables")
        cosine, sine = c[at.long()][:, None], s[at.long()][:, None]

        def turn(x: torch.Tensor) -> torch.Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

        turned.copy_(turn(turned))
        _write(turn(raw_k), raw_v, places, to_k, to_v, k_scale, v_scale)

    queue("rotate_and_write", work, tensors)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """As worker.cuda.kernels.write_kv."""
    need(slots.dtype == torch.int32 and k.shape[0] == v.shape[0] == slots.shape[0], "one int32 slot for each row")
    need(k.stride(-1) == 1 and v.stride(-1) == 1, "K and V dense in their last dimension")
    raw_k, raw_v, at, to_k, to_v = (t.raw for t in (k, v, slots, keys, values))  # type: ignore[attr-defined]

    queue("write_kv", lambda: _write(raw_k, raw_v, at, to_k, to_v, k_scale, v_scale), [k, v, slots, keys, values])


def _write(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    flat_k, flat_v = keys.flatten(0, 1), values.flatten(0, 1)
    need(bool(((slots >= 0) & (slots < flat_k.shape[0])).all()), "a slot is outside the pool")
    flat_k[slots.long()] = _quantise(k, k_scale, keys.dtype)
    flat_v[slots.long()] = _quantise(v, v_scale, values.dtype)


def _quantise(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype != _FP8:
        return x.to(dtype)
    return (x.float() / scale).clamp(-448.0, 448.0).to(dtype)


def route(logits: torch.Tensor, count: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As worker.cuda.kernels.route."""
    need(logits.dtype == torch.float32 and logits.is_contiguous(), "logits must be float32 and contiguous")
    shape = (logits.shape[0], count)
    chosen, weights = (allocate(shape, (count, 1), dtype) for dtype in (torch.int32, torch.float32))
    raw, ids, masses = logits.raw, chosen.raw, weights.raw  # type: ignore[attr-defined]

    def work() -> None:
        best = raw.nan_to_num(-torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :count]
        found = raw.double().softmax(-1).gather(1, best)
        ids.copy_(best)
        masses.copy_(found / found.sum(-1, keepdim=True) if renormalise else found)

    queue("route", work, [logits, chosen, weights])
    return chosen, weights


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, order: torch.Tensor, repeat: int, rows: int
) -> torch.Tensor:
    """As worker.cuda.kernels.grouped_product. In float64: then bits do not depend on how many rows there are."""
    need(x.dtype == weight.dtype and x.stride(1) == 1 and weight.is_contiguous(), "one dtype, weights contiguous")
    need(ends.dtype == torch.int32 and len(ends) == len(weight), "an int32 end for each expert")
    need(order.dtype == torch.int64 and len(order) == len(x) * repeat, "an int64 pair for each use of an expert")
    need(rows in (16, 64), f"tiles of {rows} rows")
    out = allocate((len(order), weight.shape[1]), (weight.shape[1], 1), x.dtype)
    raw_x, weights, stops, pairs, to = (t.raw for t in (x, weight, ends, order, out))  # type: ignore[attr-defined]

    def work() -> None:
        need(pairs.sort().values.equal(torch.arange(len(pairs))), "order is no permutation of the pairs")
        need(int(stops[-1]) == len(pairs), "the last expert's end is not the number of pairs")
        first = 0
        for expert, stop in enumerate(stops.tolist()):
            need(first <= stop <= len(pairs), f"expert {expert} has rows {first} to {stop}")
            mine = pairs[first:stop]
            to[mine] = (raw_x[mine // repeat].double() @ weights[expert].double().T).to(to.dtype)
            first = stop

    queue("grouped_product", work, [x, weight, ends, order, out])
    return out


def weighted_sum(parts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As worker.cuda.kernels.weighted_sum."""
    rows, count = weights.shape
    size = parts.shape[1]
    need(parts.is_contiguous() and weights.is_contiguous() and len(parts) == rows * count, "k parts for each row")
    out = allocate((rows, size), (size, 1), torch.float32)
    of, by, to = (t.raw for t in (parts, weights, out))  # type: ignore[attr-defined]

    def work() -> None:
        total = torch.zeros(rows, size)
        for choice in range(count):
            total += by[:, choice, None] * of[choice::count].float()
        to.copy_(total)

    queue("weighted_sum", work, [parts, weights, out])
    return out
