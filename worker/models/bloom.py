"""BLOOM (Workshop BigScience 2022): ALiBi in place of position embeddings, LayerNorm, GELU, biases everywhere."""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend
from worker.layers.embedding import Embedding, Head
from worker.layers.linear import Linear, RowLinear
from worker.layers.module import Module, Target
from worker.layers.norm import LayerNorm
from worker.layers.ops import Ops
from worker.models.base import Model
from worker.ranks.group import ALONE, Group


class Attention(Module):
    """Multi-head self-attention; positions are the backend's matter (ALiBi)."""

    def __init__(self, config: ModelConfig, target: Target, layer: int) -> None:
        self.layer = layer
        heads, _ = target.group.share_heads(config)
        self.heads, self.head_dim = heads.size, config.head_dim
        self.qkv = Linear(target, config.hidden_size, heads.times(3 * self.head_dim), bias=True)
        self.o = RowLinear(target, heads.times(self.head_dim), config.hidden_size, bias=True)

    def pack(self) -> None:
        """Checkpoints interleave q, k and v head by head: sort rows [heads, 3, d] into [3, heads, d]."""
        for parameter in self.qkv.parameters().values():
            rows = parameter.tensor
            by_head = rows.view(self.heads, 3, self.head_dim, -1)
            parameter.tensor = by_head.transpose(0, 1).reshape(rows.shape)
        super().pack()

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, self.head_dim).unbind(1)  # each [N, heads, d]
        return self.o(attention.run(self.layer, q, k, v))


class MLP(Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig, target: Target) -> None:
        inner = target.group.share_features(config.intermediate_size)
        self.up = Linear(target, config.hidden_size, inner, bias=True)
        self.down = RowLinear(target, inner, config.hidden_size, bias=True)
        self._ops = target.ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._ops.gelu(self.up(x)))


class Layer(Module):
    """Attention, then MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, target: Target, index: int) -> None:
        self.attention_norm = LayerNorm(target, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, target, index)
        self.mlp_norm = LayerNorm(target, config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, target)

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), attention)
        return x + self.mlp(self.mlp_norm(x))


class Bloom(Model):
    """Embedding and its norm, layers, norm, head."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "layers.{}.attention_norm": "transformer.h.{}.input_layernorm",
        "layers.{}.attention.qkv": "transformer.h.{}.self_attention.query_key_value",
        "layers.{}.attention.o": "transformer.h.{}.self_attention.dense",
        "layers.{}.mlp_norm": "transformer.h.{}.post_attention_layernorm",
        "layers.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
        "layers.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
    }
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]] = (("transformer.", ""),)  # BigScience's own files

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        if config.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; supported: gelu_pytorch_tanh")
        target = Target(ops, group, dtype)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(target, vocab, hidden)
        self.embedding_norm = LayerNorm(target, hidden, config.norm_eps)
        self.layers = [Layer(config, target, index) for index in range(config.num_layers)]
        self.norm = LayerNorm(target, hidden, config.norm_eps)
        self.head = Head(target, vocab, hidden, tied=self.embedding if config.tie_word_embeddings else None)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x = self.embedding_norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))
