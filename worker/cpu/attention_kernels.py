"""Batch-invariant attention kernels for CPUs, on paged K/V: a token's bits depend on its context alone.

Context is walked in blocks of 64 absolute positions, in order, with a running softmax (Milakov & Gimelshein
2018); within a block each operation has one fixed order. How tokens are grouped into work items decides only
how often K and V are loaded, never what is added to what.

Layouts, each contiguous, float32 or bfloat16 bits as uint16:
    keys   [page, kv head, offset // LANES, d, offset % LANES]   one dimension of LANES keys is one vector
    values [page, kv head, offset, d]
"""

from typing import Any

import numpy as np
from numba import prange

from worker.cpu.jit import ZERO, exp, fma, helper, kernel, narrow, tanh, widen

BLOCK = 64  # absolute positions a block
LANES = 16  # keys of a tile, and partial sums of the softmax denominator
MINUS_INFINITY = np.float32(-np.inf)
NEGLIGIBLE = np.float32(
    -60.0
)  # e^-60 of the largest weight is lost in a float32 sum, and its denormal products are slow


@kernel
def write_kv(k: Any, v: Any, kv_slots: Any, keys: Any, values: Any) -> None:
    """Put k and v [n, kv heads, d] of the first T tokens into slots kv_slots [T] = page × page_size + offset."""
    page_size = values.shape[2]
    for token in prange(kv_slots.shape[0]):
        page = kv_slots[token] // page_size
        offset = kv_slots[token] % page_size
        for head in range(k.shape[1]):
            for i in range(k.shape[2]):
                keys[page, head, offset // LANES, i, offset % LANES] = k[token, head, i]
                values[page, head, offset, i] = v[token, head, i]


@helper
def _load_block(
    keys: Any, values: Any, pages: Any, head: Any, behind: Any, start: Any, end: Any, k: Any, v: Any
) -> None:
    """Widen positions start..end of one kv head into k [d, BLOCK] and v [BLOCK, d]. `pages` begin at position `behind`.

    Before `behind` and beyond `end`, v is zero, so that weights of 0 add nothing; k holds whatever lay in the page's
    last tile or in an earlier block, finite or not.
    """
    page_size = values.shape[2]
    count = end - start
    at = max(behind - start, 0)
    for j in range(at):
        for i in range(v.shape[1]):
            v[j, i] = ZERO
    while at < count:
        page = pages[(start + at - behind) // page_size]
        offset = (start + at) % page_size
        span = min(page_size - offset, count - at)
        for j in range(span):
            for i in range(v.shape[1]):
                v[at + j, i] = widen(values[page, head, offset + j, i])
        if page_size % LANES == 0:  # then blocks begin with a tile, and so do pages
            for j in range(0, span, LANES):
                for i in range(k.shape[0]):
                    for lane in range(LANES):
                        k[i, at + j + lane] = widen(keys[page, head, (offset + j) // LANES, i, lane])
        else:
            for j in range(span):
                for i in range(k.shape[0]):
                    k[i, at + j] = widen(keys[page, head, (offset + j) // LANES, i, (offset + j) % LANES])
        at += span
    for at in range(count, BLOCK):
        for i in range(v.shape[1]):
            v[at, i] = ZERO


@helper
def _scores(q: Any, k: Any, scores: Any) -> None:
    """scores[n, BLOCK] = q[n, d] k[d, BLOCK], summed over d in order; d is a multiple of 4."""
    for n in range(q.shape[0]):
        for j in range(BLOCK):
            scores[n, j] = ZERO
        for i in range(0, q.shape[1], 4):
            a, b, c, d = q[n, i], q[n, i + 1], q[n, i + 2], q[n, i + 3]
            for j in range(BLOCK):
                first = fma(b, k[i + 1, j], fma(a, k[i, j], scores[n, j]))
                scores[n, j] = fma(d, k[i + 3, j], fma(c, k[i + 2, j], first))


@helper
def _cap(scores: Any, cap: Any) -> None:
    """scores[BLOCK] = cap × tanh(scores / cap)."""
    for j in range(BLOCK):
        scores[j] = cap * tanh(scores[j] / cap)


@helper
def _add_distances(scores: Any, slope: Any, distance: Any) -> None:
    """Add slope × distance to scores[BLOCK], whose first key lies `distance` ≤ 0 before the query."""
    for j in range(BLOCK):
        scores[j] += slope * np.float32(distance + j)


@helper
def _softmax(scores: Any, low: Any, high: Any, largest: Any, lanes: Any) -> Any:
    """Turn scores [BLOCK] into weights, those outside low..high into 0, relative to the new running maximum.

    Adds the weights to lanes [LANES]. Returns (new maximum, factor for what was summed under the old one).
    """
    new = largest
    for j in range(low, high):
        new = max(new, scores[j])
    factor = exp(largest - new) if largest != MINUS_INFINITY else ZERO
    for j in range(BLOCK):
        distance = scores[j] - new
        weight = exp(distance)
        scores[j] = weight if low <= j < high and not distance < NEGLIGIBLE else ZERO
    for lane in range(LANES):
        lanes[lane] *= factor
    for j in range(0, BLOCK, LANES):
        for lane in range(LANES):
            lanes[lane] += scores[j + lane]
    return new, factor


@helper
def _add_values(weights: Any, v: Any, factor: Any, out: Any) -> None:
    """out[d] = out × factor + weights[BLOCK] v[BLOCK, d], summed over the block in order."""
    for i in range(out.shape[0]):
        out[i] *= factor
    for j in range(0, BLOCK, 4):
        a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(out.shape[0]):
            first = fma(b, v[j + 1, i], fma(a, v[j, i], out[i]))
            out[i] = fma(d, v[j + 3, i], fma(c, v[j + 2, i], first))


@kernel
def attend(
    q: Any,
    keys: Any,
    values: Any,
    items: Any,
    positions: Any,
    indptr: Any,
    indices: Any,
    first_pages: Any,
    window: Any,
    scale: Any,
    soft_cap: Any,
    slopes: Any,
    out: Any,
) -> None:
    """out[n, heads × d] = softmax(q Kᵀ × scale) V for q [n, heads, d].

    Scores are capped by `soft_cap` if not 0, and biased by distance if there are slopes [heads] (ALiBi).

    items [i, 4] int32: row, first token, count of tokens, kv head. positions [T]; row r's pages, from number
    first_pages[r] on, are indices[indptr[r] : indptr[r + 1]]. A token sees positions up to its own, the last `window`
    of them if not 0.
    """
    head_dim = q.shape[2]
    group = q.shape[1] // keys.shape[1]
    for item in prange(items.shape[0]):
        row, first, count, head = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        pages = indices[indptr[row] : indptr[row + 1]]
        behind = first_pages[row] * values.shape[2]
        size = count * group
        query = np.empty((size, head_dim), np.float32)
        for n in range(size):
            for i in range(head_dim):
                query[n, i] = widen(q[first + n // group, head * group + n % group, i]) * scale
        largest = np.full(size, MINUS_INFINITY, np.float32)
        lanes = np.zeros((size, LANES), np.float32)
        total = np.zeros((size, head_dim), np.float32)
        k = np.zeros((head_dim, BLOCK), np.float32)
        v = np.empty((BLOCK, head_dim), np.float32)
        scores = np.empty((size, BLOCK), np.float32)
        last = positions[first + count - 1]
        begin = max(positions[first] - window + 1, 0) if window > 0 else 0
        for start in range(begin // BLOCK * BLOCK, last + 1, BLOCK):
            _load_block(keys, values, pages, head, behind, start, min(start + BLOCK, last + 1), k, v)
            _scores(query, k, scores)
            for n in range(size):
                position = positions[first + n // group]
                low = max(position - window + 1 - start, 0) if window > 0 else 0
                high = min(position + 1 - start, BLOCK)
                if low < high:
                    if soft_cap > ZERO:
                        _cap(scores[n], soft_cap)
                    if slopes.shape[0] > 0:
                        _add_distances(scores[n], slopes[head * group + n % group], start - position)
                    largest[n], factor = _softmax(scores[n], low, high, largest[n], lanes[n])
                    _add_values(scores[n], v, factor, total[n])
        for n in range(size):
            denominator = ZERO
            for lane in range(LANES):
                denominator += lanes[n, lane]
            column = (head * group + n % group) * head_dim
            for i in range(head_dim):
                out[first + n // group, column + i] = narrow(total[n, i] / denominator, out)
