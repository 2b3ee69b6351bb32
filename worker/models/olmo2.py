"""OLMo 2 (2024): Llama with norms behind attention and MLP, not before them, and over all heads of q and of k."""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.mlp import GatedMLP
from worker.layers.module import Target
from worker.layers.norm import RMSNorm
from worker.models.base import Block
from worker.models.llama import HUGGING_FACE_NAMES, Attention, Llama


class Layer(Block):
    """Attention, then MLP, each before a norm and around a residual."""

    def __init__(self, config: ModelConfig, target: Target, index: int) -> None:
        self.attention = Attention(config, target, index)
        self.attention_post_norm = RMSNorm(target, config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(target, config.hidden_size, config.intermediate_size, config.hidden_act)
        self.mlp_post_norm = RMSNorm(target, config.hidden_size, config.norm_eps)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if delta is None else x + delta
        x = x + self.attention_post_norm(self.attention(x, rotation, attention))
        return x, self.mlp_post_norm(self.mlp(x))


class Olmo2(Llama):
    """See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    }
    gguf_names: ClassVar[dict[str, str]] = {}

    def _layer(self, config: ModelConfig, target: Target, index: int) -> Block:
        return Layer(config, target, index)
