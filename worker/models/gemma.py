"""Gemma 2 (2024) and the text part of Gemma 3 (2025).

What differs from Llama: embeddings scaled by √hidden, a norm behind attention and MLP too, norm weights that
checkpoints hold less 1, GeGLU. Windows and full attention take turns: 1:1 in Gemma 2, 5:1 in Gemma 3, whose
windowed layers have a RoPE of their own. Gemma 2 caps attention scores and logits; Gemma 3 has norms on q and k.
"""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.embedding import Embedding, Head
from worker.layers.gemm_shape import GemmShape
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.layers.rope import Rope
from worker.models.llama import GGUF_NAMES, HUGGING_FACE_NAMES, Attention, Llama
from worker.ranks.group import ALONE, Group

NORM_OFFSET = 1.0


class Layer:
    """One transformer block: attention, then MLP, each between two norms and around a residual."""

    def __init__(self, config: ModelConfig, ops: Ops, group: Group, layer: int, *, dtype: torch.dtype) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(ops, config.hidden_size, config.norm_eps, offset=NORM_OFFSET, dtype=dtype)

        self.windowed = bool(config.windows and config.windows[layer])
        self.attention_norm, self.attention_post_norm = norm(), norm()
        self.attention = Attention(config, ops, group, layer, norm_offset=NORM_OFFSET, dtype=dtype)
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.mlp = GatedMLP(ops, group, config.hidden_size, config.intermediate_size, ops.gelu_mul, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [
            *self.attention_norm.parameters(f"{prefix}.attention_norm"),
            *self.attention.parameters(f"{prefix}.attention"),
            *self.attention_post_norm.parameters(f"{prefix}.attention_post_norm"),
            *self.mlp_norm.parameters(f"{prefix}.mlp_norm"),
            *self.mlp.parameters(f"{prefix}.mlp"),
            *self.mlp_post_norm.parameters(f"{prefix}.mlp_post_norm"),
        ]

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's input is x + delta (None = 0), its output the sum of what is returned: the next norm adds up."""
        x, normed = self.attention_norm.add(x, delta)
        attended = self.attention_post_norm(self.attention(normed, rotation, attention))
        x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp_post_norm(self.mlp(normed))


class Gemma:
    """Embedding, layers, norm, head. See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.attention_post_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.mlp_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
        "layers.{}.mlp_post_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
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
        "layers.{}.attention_post_norm.weight": "blk.{}.post_attention_norm.weight",
        "layers.{}.mlp_post_norm.weight": "blk.{}.post_ffw_norm.weight",
    }

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        if config.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only gelu_pytorch_tanh")
        self._ops = ops
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(group, vocab, hidden, dtype=dtype)
        self.layers = [Layer(config, ops, group, layer, dtype=dtype) for layer in range(config.num_layers)]
        self.norm = RMSNorm(ops, hidden, config.norm_eps, offset=NORM_OFFSET, dtype=dtype)
        self.head = Head(ops, group, vocab, hidden, tied=config.tie_word_embeddings, dtype=dtype)
        self.rope = Rope(config.rope, config.head_dim, max_position)
        self.windowed_rope = self.rope
        if config.windowed_rope is not None:
            self.windowed_rope = Rope(config.windowed_rope, config.head_dim, max_position)
        # Rounded to the model's dtype, as those who trained it did.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
        self._logit_soft_cap = config.logit_soft_cap

    def parameters(self) -> list[Parameter]:
        found = self.embedding.parameters("embedding")
        for index, layer in enumerate(self.layers):
            found += layer.parameters(f"layers.{index}")
        return found + self.norm.parameters("norm") + self.head.parameters("head")

    def pack(self) -> None:
        for layer in self.layers:
            layer.pack()
        self.head.pack(self.embedding.weight)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x, delta = self.embedding(ids) * self._embedding_scale, None
        rotation, windowed = self.rope(positions), self.windowed_rope(positions)
        for layer in self.layers:
            x, delta = layer(x, delta, windowed if layer.windowed else rotation, attention)
        return x if delta is None else x + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(hidden))
        return self._ops.soft_cap(logits, self._logit_soft_cap) if self._logit_soft_cap else logits

    @staticmethod
    def gemm_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int, sampled: int) -> list[GemmShape]:
        return Llama.gemm_shapes(config, dtype, tokens, sampled)
