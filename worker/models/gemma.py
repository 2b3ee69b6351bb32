"""Gemma 2 (2024) and the text part of Gemma 3 (2025).

What differs from Llama: embeddings scaled by √hidden, a norm behind attention and MLP too, norm weights that
checkpoints hold less 1, GeGLU. Windows and full attention take turns: 1:1 in Gemma 2, 5:1 in Gemma 3, whose
windowed layers have a RoPE of their own. Gemma 2 caps attention scores and logits; Gemma 3 has norms on q and k.
"""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.mlp import GatedMLP
from worker.layers.module import Target
from worker.layers.norm import RMSNorm
from worker.layers.ops import Ops
from worker.layers.rope import Rope
from worker.models.base import Block
from worker.models.llama import GGUF_NAMES, HUGGING_FACE_NAMES, Attention, Llama
from worker.ranks.group import ALONE, Group

NORM_OFFSET = 1.0


class Layer(Block):
    """Attention, then MLP, each between two norms and around a residual."""

    def __init__(self, config: ModelConfig, target: Target, index: int) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(target, config.hidden_size, config.norm_eps, offset=NORM_OFFSET)

        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.attention = Attention(config, target, index, norm_offset=NORM_OFFSET)
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = GatedMLP(target, config.hidden_size, config.intermediate_size, config.hidden_act)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention_norm.add(x, delta)
        attended = self.attention_post_norm(self.attention(normed, rotation, attention))
        x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp_post_norm(self.mlp(normed))


class Gemma(Llama):
    """See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
        "layers.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    }
    # Gemma 3 from 4B on comes with a vision tower, which is not run.
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.", "language_model.model."),
        ("model.", "model.language_model."),
    )
    hugging_face_ignored: ClassVar[tuple[str, ...]] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
    gguf_names: ClassVar[dict[str, str]] = {
        **GGUF_NAMES,
        "layers.{}.attention_post_norm": "blk.{}.post_attention_norm",
        "layers.{}.mlp_post_norm": "blk.{}.post_ffw_norm",
    }
    norm_offset: ClassVar[float] = NORM_OFFSET

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        super().__init__(config, ops, dtype=dtype, max_position=max_position, group=group)
        self.windowed = [bool(window) for window in config.windows] or [False] * config.num_layers
        self.windowed_rope = self.rope
        if config.windowed_rope is not None:
            self.windowed_rope = Rope(config.windowed_rope, config.head_dim, max_position)
        # Rounded to the model's dtype, as those who trained it did.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
        self.logit_soft_cap = config.logit_soft_cap
        self._ops = ops

    def _layer(self, config: ModelConfig, target: Target, index: int) -> Block:
        return Layer(config, target, index)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) * self.embedding_scale

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x, delta = self._embed(ids), None
        rotation, windowed_rotation = self.rope(positions), self.windowed_rope(positions)
        for layer, windowed in zip(self.layers, self.windowed, strict=True):
            x, delta = layer(x, delta, windowed_rotation if windowed else rotation, attention)
        return x if delta is None else x + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return self._ops.soft_cap(logits, self.logit_soft_cap) if self.logit_soft_cap else logits
