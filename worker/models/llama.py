"""The Llama decoder (Touvron et al. 2023) and the families that differ from it by a flag.

- Llama 2, 3, 3.1, 3.2, SmolLM2: as it stands; they differ in sizes, tied embeddings and RoPE scaling.
- Mistral: layers that attend to a window of the last W positions (`windows`).
- Qwen2, Qwen2.5: biases on q, k and v (`qkv_bias`).
- Qwen3: RMSNorm on each head of q and k before RoPE (`qk_norm`).

Shapes: N tokens (padded), H query heads and K key/value heads of this rank, D head size.
"""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.layers.embedding import Embedding, Head
from worker.layers.experts import Mixture
from worker.layers.gemm_shape import GemmShape
from worker.layers.linear import Linear, RowLinear
from worker.layers.mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.layers.ops import Ops
from worker.layers.parameter import Parameter
from worker.layers.rope import Rope
from worker.ranks.group import ALONE, Group

# How checkpoints call the parameters: (ours, theirs), {} the number of the layer.
HUGGING_FACE_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers.{}.attention.o.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.o.bias": "model.layers.{}.self_attn.o_proj.bias",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.mlp_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.mlp.gate.bias": "model.layers.{}.mlp.gate_proj.bias",
    "layers.{}.mlp.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.mlp.up.bias": "model.layers.{}.mlp.up_proj.bias",
    "layers.{}.mlp.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.mlp.down.bias": "model.layers.{}.mlp.down_proj.bias",
}
GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "layers.{}.attention_norm.weight": "blk.{}.attn_norm.weight",
    "layers.{}.attention.q.weight": "blk.{}.attn_q.weight",
    "layers.{}.attention.q.bias": "blk.{}.attn_q.bias",
    "layers.{}.attention.k.weight": "blk.{}.attn_k.weight",
    "layers.{}.attention.k.bias": "blk.{}.attn_k.bias",
    "layers.{}.attention.v.weight": "blk.{}.attn_v.weight",
    "layers.{}.attention.v.bias": "blk.{}.attn_v.bias",
    "layers.{}.attention.o.weight": "blk.{}.attn_output.weight",
    "layers.{}.attention.o.bias": "blk.{}.attn_output.bias",
    "layers.{}.attention.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "layers.{}.attention.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "layers.{}.mlp_norm.weight": "blk.{}.ffn_norm.weight",
    "layers.{}.mlp.gate.weight": "blk.{}.ffn_gate.weight",
    "layers.{}.mlp.gate.bias": "blk.{}.ffn_gate.bias",
    "layers.{}.mlp.up.weight": "blk.{}.ffn_up.weight",
    "layers.{}.mlp.up.bias": "blk.{}.ffn_up.bias",
    "layers.{}.mlp.down.weight": "blk.{}.ffn_down.weight",
    "layers.{}.mlp.down.bias": "blk.{}.ffn_down.bias",
}


class Attention:
    """Grouped-query self-attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(
        self, config: ModelConfig, ops: Ops, group: Group, layer: int, *, norm_offset: float = 0.0, dtype: torch.dtype
    ) -> None:
        """`norm_offset` is that of the norms of q and k."""
        self.layer = layer
        self.head_dim = config.head_dim
        heads, kv_heads = group.share_heads(config)
        self.heads, self.kv_heads = heads.size, kv_heads.size
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv = Linear(ops, config.hidden_size, {"q": q, "k": kv, "v": kv}, bias=config.qkv_bias, dtype=dtype)
        self.o = RowLinear(ops, group, q, "o", config.hidden_size, bias=config.out_bias, dtype=dtype)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(ops, self.head_dim, config.norm_eps, offset=norm_offset, dtype=dtype)
            self.k_norm = RMSNorm(ops, self.head_dim, config.norm_eps, offset=norm_offset, dtype=dtype)

    def parameters(self, prefix: str) -> list[Parameter]:
        found = self.qkv.parameters(prefix) + self.o.parameters(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            found += self.q_norm.parameters(f"{prefix}.q_norm") + self.k_norm.parameters(f"{prefix}.k_norm")
        return found

    def pack(self) -> None:
        self.qkv.pack()
        self.o.pack()

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: AttentionBackend) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [N, H + 2K, D]
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o(attention.run(self.layer, q, k, v, rotation))


def attention_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> list[GemmShape]:
    """Attention's matrix products."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        GemmShape(q_size + 2 * kv_size, config.hidden_size, dtype, tokens),
        GemmShape(config.hidden_size, q_size, dtype, tokens),
    ]


class Layer:
    """One transformer block: attention, then MLP, each behind a norm and around a residual."""

    def __init__(
        self, config: ModelConfig, ops: Ops, group: Group, layer: int, mlp: GatedMLP | Mixture, *, dtype: torch.dtype
    ) -> None:
        self.attention_norm = RMSNorm(ops, config.hidden_size, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, ops, group, layer, dtype=dtype)
        self.mlp_norm = RMSNorm(ops, config.hidden_size, config.norm_eps, dtype=dtype)
        self.mlp = mlp

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

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's input is x + delta (None = 0), its output the sum of what is returned: the next norm adds up."""
        x, normed = self.attention_norm.add(x, delta)
        x, normed = self.mlp_norm.add(x, self.attention(normed, rotation, attention))
        return x, self.mlp(normed)


class Llama:
    """Embedding, layers, norm, head. See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = HUGGING_FACE_NAMES
    hugging_face_roots: ClassVar[tuple[tuple[str, str], ...]] = ()
    hugging_face_ignored: ClassVar[tuple[str, ...]] = ()
    gguf_names: ClassVar[dict[str, str]] = GGUF_NAMES

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        """Weights are allocated, not set: fill `parameters()`, then call `pack()`. Raises ValueError for the config."""
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only silu")
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(group, vocab, hidden, dtype=dtype)
        self.layers = [
            Layer(config, ops, group, layer, self._mlp(config, ops, group, layer, dtype), dtype=dtype)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(ops, hidden, config.norm_eps, dtype=dtype)
        self.head = Head(ops, group, vocab, hidden, tied=config.tie_word_embeddings, dtype=dtype)
        self.rope = Rope(config.rope, config.head_dim, max_position)

    def _mlp(self, config: ModelConfig, ops: Ops, group: Group, layer: int, dtype: torch.dtype) -> GatedMLP | Mixture:
        """SwiGLU."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return GatedMLP(ops, group, hidden, inner, ops.silu_mul, bias=config.mlp_bias, dtype=dtype)

    def parameters(self) -> list[Parameter]:
        """Every tensor that a checkpoint must fill; a tied head has none of its own."""
        found = self.embedding.parameters("embedding")
        for index, layer in enumerate(self.layers):
            found += layer.parameters(f"layers.{index}")
        return found + self.norm.parameters("norm") + self.head.parameters("head")

    def pack(self) -> None:
        """Once every parameter is filled: lay weights out as the device wants them."""
        for layer in self.layers:
            layer.pack()
        self.head.pack(self.embedding.weight)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """ids [N], positions [T ≤ N] int32 → hidden states [N, hidden] before the last norm."""
        x, delta = self.embedding(ids), None
        rotation = self.rope(positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rotation, attention)
        return x if delta is None else x + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] → [N, vocab] float32."""
        return self.head(self.norm(hidden))

    @staticmethod
    def gemm_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int, sampled: int) -> list[GemmShape]:
        """Every matrix product above, in steps of up to `tokens` tokens and `sampled` rows of logits."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return [
            *attention_shapes(config, dtype, tokens),
            GemmShape(2 * inner, hidden, dtype, tokens),
            GemmShape(hidden, inner, dtype, tokens),
            GemmShape(config.vocab_size, hidden, torch.float32, sampled),
        ]
