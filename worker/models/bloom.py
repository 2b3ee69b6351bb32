"""BLOOM (Workshop BigScience 2022): ALiBi in place of position embeddings, LayerNorm, GELU, biases everywhere."""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend
from worker.layers.embedding import Embedding, Head
from worker.layers.gemm_shape import GemmShape
from worker.layers.linear import Linear, RowLinear
from worker.layers.norm import LayerNorm
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.models.llama import attention_shapes
from worker.ranks.group import ALONE, Group


class Attention:
    """Multi-head self-attention; positions are the backend's matter (ALiBi)."""

    def __init__(self, config: ModelConfig, ops: Ops, group: Group, layer: int, *, dtype: torch.dtype) -> None:
        self.layer = layer
        heads, _ = group.share_heads(config)
        self.heads, self.head_dim = heads.size, config.head_dim
        self.qkv = Linear(ops, config.hidden_size, {"qkv": heads.times(3 * self.head_dim)}, bias=True, dtype=dtype)
        self.o = RowLinear(ops, group, heads.times(self.head_dim), "o", config.hidden_size, bias=True, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return self.qkv.parameters(prefix) + self.o.parameters(prefix)

    def pack(self) -> None:
        """Checkpoints interleave q, k and v head by head: sort rows [heads, 3, d] into [3, heads, d]."""

        def sort(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(self.heads, 3, self.head_dim, -1).transpose(0, 1).reshape(rows.shape)

        self.qkv.weight = sort(self.qkv.weight)
        self.qkv.bias = sort(self.qkv.bias) if self.qkv.bias is not None else None
        self.qkv.pack()
        self.o.pack()

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, self.head_dim).unbind(1)  # each [N, heads, d]
        return self.o(attention.run(self.layer, q, k, v))


class MLP:
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig, ops: Ops, group: Group, *, dtype: torch.dtype) -> None:
        self._ops = ops
        inner = group.share_features(config.intermediate_size)
        self.up = Linear(ops, config.hidden_size, {"up": inner}, bias=True, dtype=dtype)
        self.down = RowLinear(ops, group, inner, "down", config.hidden_size, bias=True, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return self.up.parameters(prefix) + self.down.parameters(prefix)

    def pack(self) -> None:
        self.up.pack()
        self.down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._ops.gelu(self.up(x)))


class Layer:
    """One transformer block: attention, then MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, ops: Ops, group: Group, layer: int, *, dtype: torch.dtype) -> None:
        self.attention_norm = LayerNorm(ops, config.hidden_size, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, ops, group, layer, dtype=dtype)
        self.mlp_norm = LayerNorm(ops, config.hidden_size, config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, ops, group, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        return [
            *self.attention_norm.parameters(f"{prefix}.attention_norm"),
            *self.attention.parameters(f"{prefix}.attention"),
            *self.mlp_norm.parameters(f"{prefix}.mlp_norm"),
            *self.mlp.parameters(f"{prefix}.mlp"),
        ]

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), attention)
        return x + self.mlp(self.mlp_norm(x))


class Bloom:
    """Embedding and its norm, layers, norm, head. See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        "embedding.weight": "transformer.word_embeddings.weight",
        "embedding_norm.weight": "transformer.word_embeddings_layernorm.weight",
        "embedding_norm.bias": "transformer.word_embeddings_layernorm.bias",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
        "layers.{}.attention_norm.weight": "transformer.h.{}.input_layernorm.weight",
        "layers.{}.attention_norm.bias": "transformer.h.{}.input_layernorm.bias",
        "layers.{}.attention.qkv.weight": "transformer.h.{}.self_attention.query_key_value.weight",
        "layers.{}.attention.qkv.bias": "transformer.h.{}.self_attention.query_key_value.bias",
        "layers.{}.attention.o.weight": "transformer.h.{}.self_attention.dense.weight",
        "layers.{}.attention.o.bias": "transformer.h.{}.self_attention.dense.bias",
        "layers.{}.mlp_norm.weight": "transformer.h.{}.post_attention_layernorm.weight",
        "layers.{}.mlp_norm.bias": "transformer.h.{}.post_attention_layernorm.bias",
        "layers.{}.mlp.up.weight": "transformer.h.{}.mlp.dense_h_to_4h.weight",
        "layers.{}.mlp.up.bias": "transformer.h.{}.mlp.dense_h_to_4h.bias",
        "layers.{}.mlp.down.weight": "transformer.h.{}.mlp.dense_4h_to_h.weight",
        "layers.{}.mlp.down.bias": "transformer.h.{}.mlp.dense_4h_to_h.bias",
    }
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]] = (("transformer.", ""),)  # BigScience's own files
    hugging_face_ignored: ClassVar[tuple[str, ...]] = ()
    gguf_names: ClassVar[dict[str, str]] = {}

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        if config.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only gelu_pytorch_tanh")
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(group, vocab, hidden, dtype=dtype)
        self.embedding_norm = LayerNorm(ops, hidden, config.norm_eps, dtype=dtype)
        self.layers = [Layer(config, ops, group, layer, dtype=dtype) for layer in range(config.num_layers)]
        self.norm = LayerNorm(ops, hidden, config.norm_eps, dtype=dtype)
        self.head = Head(ops, group, vocab, hidden, tied=config.tie_word_embeddings, dtype=dtype)

    def parameters(self) -> list[Parameter]:
        found = self.embedding.parameters("embedding") + self.embedding_norm.parameters("embedding_norm")
        for index, layer in enumerate(self.layers):
            found += layer.parameters(f"layers.{index}")
        return found + self.norm.parameters("norm") + self.head.parameters("head")

    def pack(self) -> None:
        for layer in self.layers:
            layer.pack()
        self.head.pack(self.embedding.weight)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x = self.embedding_norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))

    @staticmethod
    def gemm_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int, sampled: int) -> list[GemmShape]:
        hidden, inner = config.hidden_size, config.intermediate_size
        return [
            *attention_shapes(config, dtype, tokens),
            GemmShape(inner, hidden, dtype, tokens),
            GemmShape(hidden, inner, dtype, tokens),
            GemmShape(config.vocab_size, hidden, torch.float32, sampled),
        ]
