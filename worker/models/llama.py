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
from worker.layers.linear import Linear, RowLinear
from worker.layers.mlp import GatedMLP
from worker.layers.module import Module, Target
from worker.layers.norm import RMSNorm, SharedRMSNorm
from worker.layers.ops import Ops
from worker.layers.rope import Rope, pair_across_halves
from worker.models.base import Block, Model
from worker.ranks.group import ALONE, Group

HUGGING_FACE_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.qkv.q": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.qkv.k": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.qkv.v": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.o": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.gate_up.gate": "model.layers.{}.mlp.gate_proj",
    "layers.{}.mlp.gate_up.up": "model.layers.{}.mlp.up_proj",
    "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
}
GGUF_NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers.{}.attention_norm": "blk.{}.attn_norm",
    "layers.{}.attention.qkv.q": "blk.{}.attn_q",
    "layers.{}.attention.qkv.k": "blk.{}.attn_k",
    "layers.{}.attention.qkv.v": "blk.{}.attn_v",
    "layers.{}.attention.o": "blk.{}.attn_output",
    "layers.{}.attention.q_norm": "blk.{}.attn_q_norm",
    "layers.{}.attention.k_norm": "blk.{}.attn_k_norm",
    "layers.{}.mlp_norm": "blk.{}.ffn_norm",
    "layers.{}.mlp.gate_up.gate": "blk.{}.ffn_gate",
    "layers.{}.mlp.gate_up.up": "blk.{}.ffn_up",
    "layers.{}.mlp.down": "blk.{}.ffn_down",
}


class Attention(Module):
    """Grouped-query self-attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, target: Target, layer: int, *, norm_offset: float = 0.0) -> None:
        """`norm_offset` is that of the norms of q and k."""
        self.layer = layer
        self.head_dim = config.head_dim
        heads, kv_heads = target.group.share_heads(config)
        self.heads, self.kv_heads = heads.size, kv_heads.size
        q, kv = heads.times(self.head_dim), kv_heads.times(self.head_dim)
        self.qkv = Linear(target, config.hidden_size, {"q": q, "k": kv, "v": kv}, bias=config.qkv_bias)
        self.o = RowLinear(target, q, config.hidden_size, bias=config.out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.wide_qk_norm:
            self.q_norm = SharedRMSNorm(target, q, config.norm_eps)
            self.k_norm = SharedRMSNorm(target, kv, config.norm_eps)
        elif config.qk_norm:
            self.q_norm = RMSNorm(target, self.head_dim, config.norm_eps, offset=norm_offset)
            self.k_norm = RMSNorm(target, self.head_dim, config.norm_eps, offset=norm_offset)
        self.rotary_dim = config.rotary_dim or self.head_dim
        if self.rotary_dim < self.head_dim and self.q_norm is not None:
            raise ValueError("heads that rotate in part are not supported together with norms of q and k")

    def pack(self) -> None:
        """Sort each head's dimensions as kernels rotate them, where not all of them rotate."""
        if self.rotary_dim < self.head_dim:
            for parameter in self.qkv.parameters().values():
                for name, _, _, rows in parameter.slices():
                    if name in ("q", "k"):
                        heads = rows.view(-1, self.head_dim, *rows.shape[1:])
                        heads.copy_(pair_across_halves(heads, self.rotary_dim))
        super().pack()

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: AttentionBackend) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [N, H + 2K, D]
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o(attention.run(self.layer, q, k, v, rotation))


class Layer(Block):
    """Attention, then MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, target: Target, index: int, mlp: GatedMLP | Mixture) -> None:
        self.attention_norm = RMSNorm(target, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, target, index)
        self.mlp_norm = RMSNorm(target, config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention_norm.add(x, delta)
        x, normed = self.mlp_norm.add(x, self.attention(normed, rotation, attention))
        return x, self.mlp(normed)


class Llama(Model):
    """Embedding, layers, norm, head."""

    hugging_face_names: ClassVar[dict[str, str]] = HUGGING_FACE_NAMES
    gguf_names: ClassVar[dict[str, str]] = GGUF_NAMES
    norm_offset: ClassVar[float] = 0.0  # on the weight of the last norm

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, max_position: int, group: Group = ALONE
    ) -> None:
        target = Target(ops, group, dtype)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = Embedding(target, vocab, hidden)
        self.layers = [self._layer(config, target, index) for index in range(config.num_layers)]
        self.norm = RMSNorm(target, hidden, config.norm_eps, offset=self.norm_offset)
        self.head = Head(target, vocab, hidden, tied=self.embedding if config.tie_word_embeddings else None)
        self.rope = Rope(config.rope, config.head_dim, max_position, config.rotary_dim)

    def _layer(self, config: ModelConfig, target: Target, index: int) -> Block:
        return Layer(config, target, index, self._mlp(config, target, index))

    def _mlp(self, config: ModelConfig, target: Target, index: int) -> GatedMLP | Mixture:
        return GatedMLP(target, config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x, delta = self._embed(ids), None
        rotation = self.rope(positions)
        for layer in self.layers:
            x, delta = layer(x, delta, rotation, attention)
        return x if delta is None else x + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))
