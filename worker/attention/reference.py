"""Attention as the paper writes it, one token at a time."""

import numpy as np
import torch

from worker.attention.base import AttentionShape, Rotation
from worker.batch import StepBatch


class ReferenceAttention:
    """Plain PyTorch in float32. Slow and obviously right: what other backends are tested against.

    Every token is computed alone, with shapes that follow from its position only; so its result cannot
    depend on what else is in the step.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        size = (shape.num_layers, shape.num_pages * shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.dtype)  # [layer, slot, kv head, d]
        self.values = torch.zeros(size, dtype=shape.dtype)
        self._slopes = torch.from_numpy(shape.slopes())

    def plan(self, batch: StepBatch) -> None:
        self._slots = torch.from_numpy(batch.kv_slots.astype(np.int64))  # [T]
        self._contexts: list[torch.Tensor] = []  # per token: the slots of positions 0..its own
        offsets = np.arange(self.shape.page_size)
        for row in range(len(batch.qo_indptr) - 1):
            pages = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
            slots = torch.from_numpy((pages[:, None].astype(np.int64) * self.shape.page_size + offsets).ravel())
            for token in range(batch.qo_indptr[row], batch.qo_indptr[row + 1]):
                self._contexts.append(slots[: batch.positions[token] + 1])

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        if rotation is not None:
            rotate(q, rotation)
            rotate(k, rotation)
        tokens = len(self._slots)
        self.keys[layer, self._slots] = k[:tokens]
        self.values[layer, self._slots] = v[:tokens]
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        for token, context in enumerate(self._contexts):
            window = self.shape.windows[layer] if self.shape.windows else 0
            out[token] = self._attend(q[token], layer, context[-window:] if window else context).flatten().to(q.dtype)
        return out

    def _attend(self, q: torch.Tensor, layer: int, context: torch.Tensor) -> torch.Tensor:
        """softmax(q Kᵀ × scale) V, q [heads, d] over the C slots of `context`; [heads, d] float32."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        k = self.keys[layer, context].float().repeat_interleave(group, dim=1)  # [C, heads, d]
        v = self.values[layer, context].float().repeat_interleave(group, dim=1)
        scores = (q.float() * k).sum(-1) * shape.scale  # [C, heads]
        if shape.logits_soft_cap:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        if shape.alibi:
            distance = torch.arange(1 - len(context), 1).unsqueeze(1)  # key position - query position
            scores = scores + distance * self._slopes
        weights = torch.softmax(scores, dim=0)
        return (weights.unsqueeze(-1) * v).sum(0)


def rotate(x: torch.Tensor, rotation: Rotation) -> None:
    """In place, x [N, heads, d]."""
    for row, position in zip(x, rotation.positions.tolist(), strict=False):
        a, b = row.float().chunk(2, dim=-1)
        c, s = rotation.cos[position], rotation.sin[position]
        row.copy_(torch.cat([a * c - b * s, b * c + a * s], dim=-1))
