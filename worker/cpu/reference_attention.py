"""Attention as the paper writes it, one token at a time."""

import numpy as np
import torch

from worker.layers.attention import AttentionShape, Rotation
from worker.steps.batch import StepBatch


class ReferenceAttention:
    """Plain PyTorch in float32. Slow and obviously right: other backends are tested against it.

    Every token is computed alone, with shapes that follow from its position only; so its result cannot
    depend on what else is in the step.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        slots = [shape.pages_of(layer) * shape.page_size for layer in range(shape.num_layers)]
        # Of each layer [slot, kv head, d]
        self.keys = [torch.zeros(n, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype) for n in slots]
        self.values = [torch.zeros(n, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype) for n in slots]
        self._slopes = torch.from_numpy(shape.slopes())

    def plan(self, batch: StepBatch) -> None:
        self._plans = {window: self._plan(batch, window) for window in dict.fromkeys((0, *self.shape.windows))}

    def _plan(self, batch: StepBatch, window: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the slots of tokens [T] in layers with this window, and for each those of all positions it sees."""
        lists, contexts = batch.pages_of(window), []
        offsets = np.arange(self.shape.page_size)
        if not len(lists.kv_slots):
            return torch.empty(0, dtype=torch.int64), []  # there are no such layers
        for row in range(len(batch.qo_indptr) - 1):
            pages = lists.kv_indices[lists.kv_indptr[row] : lists.kv_indptr[row + 1]]
            slots = torch.from_numpy((pages[:, None].astype(np.int64) * self.shape.page_size + offsets).ravel())
            begin = int(lists.first_pages[row]) * self.shape.page_size
            for token in range(batch.qo_indptr[row], batch.qo_indptr[row + 1]):
                end = int(batch.positions[token]) + 1
                contexts.append(slots[max(end - window, begin) - begin if window else 0 : end - begin])
        return torch.from_numpy(lists.kv_slots.astype(np.int64)), contexts

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        if rotation is not None:
            rotate(q, rotation)
            rotate(k, rotation)
        slots, contexts = self._plans[self.shape.window_of(layer)]
        self.keys[layer][slots] = k[: len(slots)]
        self.values[layer][slots] = v[: len(slots)]
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        for token, context in enumerate(contexts):
            out[token] = self._attend(q[token], layer, context).flatten().to(q.dtype)
        return out

    def _attend(self, q: torch.Tensor, layer: int, context: torch.Tensor) -> torch.Tensor:
        """softmax(q Kᵀ × scale) V, q [heads, d] over the C slots of `context`; [heads, d] float32."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        k = self.keys[layer][context].float().repeat_interleave(group, dim=1)  # [C, heads, d]
        v = self.values[layer][context].float().repeat_interleave(group, dim=1)
        scores = (q.float() * k).sum(-1) * shape.scale  # [C, heads]
        if shape.logits_soft_cap:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        if shape.alibi:
            distance = torch.arange(1 - len(context), 1).unsqueeze(1)  # key position - query position
            scores = scores + distance * self._slopes
        weights = torch.softmax(scores, dim=0)
        return (weights.unsqueeze(-1) * v).sum(0)


def rotate(x: torch.Tensor, rotation: Rotation) -> None:
    """Rotate x [N, heads, d] in place."""
    for row, position in zip(x, rotation.positions.tolist(), strict=False):
        a, b = row.float().chunk(2, dim=-1)
        c, s = rotation.cos[position], rotation.sin[position]
        row.copy_(torch.cat([a * c - b * s, b * c + a * s], dim=-1))
