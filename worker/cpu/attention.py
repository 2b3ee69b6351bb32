"""Attention on CPUs: numba kernels that read the pages in place."""

import numba
import numpy as np
import numpy.typing as npt
import torch

from worker.cpu import attention_kernels as kernels
from worker.cpu import kernels as row_kernels
from worker.cpu.ops import bits
from worker.device import DeviceError
from worker.layers.attention import AttentionShape, Rotation
from worker.steps.batch import I32Array, StepBatch

TILE = 8  # tokens of one row that share a load of K and V
PARALLEL_BLOCKS = 32  # fewer KV blocks are done before a second thread wakes up


class CpuAttention:
    """Paged attention for decode and prefill rows alike, in one kernel."""

    def __init__(self, shape: AttentionShape, threads: int) -> None:
        """Allocate the pages. Raises DeviceError for a head size that the kernels do not take."""
        if shape.head_dim % 4:
            raise DeviceError(
                f"head_dim {shape.head_dim} is not a multiple of 4, which attention on --device cpu needs"
            )
        self.shape = shape
        self.threads = threads
        tiles = -(-shape.page_size // kernels.LANES)
        key_page = (shape.num_kv_heads, tiles, shape.head_dim, kernels.LANES)
        value_page = (shape.num_kv_heads, shape.page_size, shape.head_dim)
        pages = [shape.pages_of(layer) for layer in range(shape.num_layers)]
        # Not touched before use: the operating system gives the memory when pages are written.
        self.keys = [bits(torch.empty(count, *key_page, dtype=shape.dtype)) for count in pages]
        self.values = [bits(torch.empty(count, *value_page, dtype=shape.dtype)) for count in pages]
        self._scale = np.float32(shape.scale)
        self._soft_cap = np.float32(shape.logits_soft_cap)
        self._slopes = shape.slopes() if shape.alibi else np.empty(0, np.float32)

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch
        self._lists = {window: batch.pages_of(window) for window in dict.fromkeys((0, *self.shape.windows))}
        self._items = work_items(batch, self.shape.num_kv_heads, self.threads)
        blocks = self.shape.num_kv_heads * (int(batch.positions.sum()) // kernels.BLOCK + len(batch.positions))
        self._used_threads = self.threads if blocks >= PARALLEL_BLOCKS else 1

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        batch = self._batch
        keys, values = self.keys[layer], self.values[layer]
        window = self.shape.window_of(layer)
        lists = self._lists[window]
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        numba.set_num_threads(self._used_threads)
        if rotation is not None:
            rotate(q, rotation)
            rotate(k, rotation)
        kernels.write_kv(bits(k), bits(v), lists.kv_slots, keys, values)
        kernels.attend(
            bits(q),
            keys,
            values,
            self._items,
            batch.positions,
            lists.kv_indptr,
            lists.kv_indices,
            lists.first_pages,
            window,
            self._scale,
            self._soft_cap,
            self._slopes,
            bits(out),
        )
        return out


def rotate(x: torch.Tensor, rotation: Rotation) -> None:
    """Rotate x [N, heads, d] in place."""
    positions, cos, sin = rotation.positions.numpy(), rotation.cos.numpy(), rotation.sin.numpy()
    row_kernels.rotate(bits(x), positions, cos, sin)


def work_items(batch: StepBatch, num_kv_heads: int, threads: int) -> I32Array:
    """Return items [i, 4] for `kernels.attend`, ordered so that each thread's contiguous share costs about the same."""
    starts = np.concatenate(
        [np.arange(a, b, TILE) for a, b in zip(batch.qo_indptr[:-1], batch.qo_indptr[1:], strict=True)]
    )
    rows = np.searchsorted(batch.qo_indptr, starts, side="right") - 1
    counts = np.minimum(TILE, batch.qo_indptr[rows + 1] - starts)
    cost = counts * (batch.positions[starts].astype(np.int64) + kernels.BLOCK)
    order = np.argsort(-cost, kind="stable")
    tiles = np.stack([rows, starts, counts], axis=1)[order].repeat(num_kv_heads, axis=0)
    heads: npt.NDArray[np.int64] = np.tile(np.arange(num_kv_heads), len(order))
    items = np.column_stack([tiles, heads]).astype(np.int32)
    return np.concatenate([items[thread::threads] for thread in range(threads)])
