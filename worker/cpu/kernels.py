"""Row-wise kernels for CPUs: a row's result depends on that row alone.

Arrays are C-contiguous, float32 or bfloat16 bits as uint16. Arithmetic is float32, rounded once on output.
"""

from typing import Any

import numpy as np
from numba import prange

from worker.cpu.jit import ONE, ZERO, exp, fma, inlined, kernel, narrow, tanh, widen

LANES = 16  # partial sums of a reduction, fixed so that its order is
GELU_1 = np.float32(2 * 0.7978845608028654)  # 2 √(2/π)
GELU_3 = np.float32(2 * 0.7978845608028654 * 0.044715)
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out[n, h] = x / √(mean(x²) + eps) × weight[h], for each row of x[n, h]."""
    rows, size = x.shape
    for row in prange(rows):
        partial = np.zeros(LANES, np.float32)
        whole = size - size % LANES
        for start in range(0, whole, LANES):
            for lane in range(LANES):
                value = widen(x[row, start + lane])
                partial[lane] = fma(value, value, partial[lane])
        for i in range(whole, size):
            value = widen(x[row, i])
            partial[i - whole] = fma(value, value, partial[i - whole])
        total = ZERO
        for lane in range(LANES):
            total += partial[lane]
        scale = ONE / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = narrow(widen(x[row, i]) * scale * widen(weight[i]), out)


@kernel
def rotate(x: Any, positions: Any, cos: Any, sin: Any) -> None:
    """Rotate x[n, heads, d] in place, dimension i with i + d/2 (the half-split order of Hugging Face).

    positions [t ≤ n] int32, cos and sin [max_position, d/2] float32.
    """
    half = x.shape[2] // 2
    for row in prange(positions.shape[0]):
        position = positions[row]
        for head in range(x.shape[1]):
            for i in range(half):
                a = widen(x[row, head, i])
                b = widen(x[row, head, i + half])
                c = cos[position, i]
                s = sin[position, i]
                x[row, head, i] = narrow(a * c - b * s, x)
                x[row, head, i + half] = narrow(b * c + a * s, x)


@kernel
def silu_mul(gate_up: Any, out: Any) -> None:
    """out[n, i] = silu(gate) × up, with gate_up [n, 2i] = gate | up."""
    rows, size = out.shape
    for row in prange(rows):
        for i in range(size):
            gate = widen(gate_up[row, i])
            out[row, i] = narrow(gate / (ONE + exp(-gate)) * widen(gate_up[row, size + i]), out)


@inlined
def _gelu(x: Any) -> Any:
    """x/2 × (1 + tanh u) = x / (1 + e^-2u), u = √(2/π) (x + 0.044715 x³)."""
    return x / (ONE + exp(-x * fma(GELU_3, x * x, GELU_1)))


@kernel
def gelu_mul(gate_up: Any, out: Any) -> None:
    """out[n, i] = gelu(gate) × up, with gate_up [n, 2i] = gate | up."""
    rows, size = out.shape
    for row in prange(rows):
        for i in range(size):
            out[row, i] = narrow(_gelu(widen(gate_up[row, i])) * widen(gate_up[row, size + i]), out)


@kernel
def gelu(x: Any, out: Any) -> None:
    """out[n, i] = gelu(x[n, i])."""
    rows, size = out.shape
    for row in prange(rows):
        for i in range(size):
            out[row, i] = narrow(_gelu(widen(x[row, i])), out)


@kernel
def soft_cap(x: Any, cap: Any, out: Any) -> None:
    """out[n, i] = cap × tanh(x[n, i] / cap)."""
    rows, size = out.shape
    for row in prange(rows):
        for i in range(size):
            out[row, i] = narrow(cap * tanh(widen(x[row, i]) / cap), out)


@kernel
def layer_norm(x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    """out[n, h] = (x - mean) / √(variance + eps) × weight[h] + bias[h], for each row of x[n, h]."""
    rows, size = x.shape
    for row in prange(rows):
        partial = np.zeros(LANES, np.float32)
        for i in range(size):
            partial[i % LANES] += widen(x[row, i])
        total = ZERO
        for lane in range(LANES):
            total += partial[lane]
        mean = total / np.float32(size)
        partial[:] = ZERO
        for i in range(size):
            distance = widen(x[row, i]) - mean
            partial[i % LANES] = fma(distance, distance, partial[i % LANES])
        total = ZERO
        for lane in range(LANES):
            total += partial[lane]
        scale = ONE / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            normal = (widen(x[row, i]) - mean) * scale
            out[row, i] = narrow(fma(normal, widen(weight[i]), widen(bias[i])), out)


@kernel
def route(logits: Any, renormalise: Any, chosen: Any, weights: Any) -> None:
    """chosen[n, k] = the row's k largest of logits[n, e], of equals the first; weights[n, k] = their softmax.

    With `renormalise` those sum to 1. A NaN makes all of its row's weights NaN.
    """
    experts, count = logits.shape[1], chosen.shape[1]
    for row in prange(logits.shape[0]):
        largest = MINUS_INFINITY
        for e in range(experts):
            largest = max(largest, logits[row, e])
        total = ZERO
        for e in range(experts):
            total += exp(logits[row, e] - largest)
        kept = ZERO
        for k in range(count):
            best = -1
            for e in range(experts):
                used = False
                for before in range(k):
                    used |= chosen[row, before] == e
                if not used and (best < 0 or logits[row, e] > logits[row, best]):
                    best = e
            chosen[row, k] = best
            weights[row, k] = exp(logits[row, best] - largest) / total
            kept += weights[row, k]
        for k in range(count):
            if total != total:
                weights[row, k] = total
            elif renormalise:
                weights[row, k] /= kept
