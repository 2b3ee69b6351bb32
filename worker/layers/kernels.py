"""Row-wise kernels of the cpu device: a row's result depends on that row alone.

Arrays are C-contiguous, float32 or bfloat16 bits as uint16. Arithmetic is float32, rounded once on output.
"""

from typing import Any

import numpy as np
from numba import prange

from worker.layers.jit import ONE, ZERO, exp, fma, kernel, narrow, widen

LANES = 16  # partial sums of a reduction, fixed so that its order is


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
