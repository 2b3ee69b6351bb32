"""Granite 3 (2024): Llama with constant factors on embeddings, on what each block adds, on scores and on logits."""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.experts import Mixture
from worker.layers.mlp import GatedMLP
from worker.layers.module import Target
from worker.layers.ops import Ops
from worker.models.base import Block
from worker.models.llama import Layer as LlamaLayer
from worker.models.llama import Llama
from worker.ranks.group import ALONE, Group


class Layer(LlamaLayer):
    """Attention, then MLP, each behind a norm and around a residual, to which they add a part of what they find."""

    def __init__(self, config: ModelConfig, target: Target, index: int, mlp: GatedMLP | Mixture) -> None:
        super().__init__(config, target, index, mlp)
        self.residual_multiplier = config.residual_multiplier

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention_norm.add(x, delta)
        attended = self.attention(normed, rotation, attention) * self.residual_multiplier
        x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp(normed) * self.residual_multiplier


class Granite(Llama):
    """See `worker.models.base.Model`."""

    gguf_names: ClassVar[dict[str, str]] = {}

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        super().__init__(config, ops, dtype=dtype, max_position=max_position, group=group)
        self.embedding_multiplier = config.embedding_multiplier
        self.logit_divisor = config.logit_divisor

    def _layer(self, config: ModelConfig, target: Target, index: int) -> Block:
        return Layer(config, target, index, self._mlp(config, target, index))

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) * self.embedding_multiplier

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) / self.logit_divisor
