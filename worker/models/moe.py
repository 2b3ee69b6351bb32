"""Llama with mixtures of experts in place of MLPs.

- Mixtral (Jiang et al. 2024): every layer; weights of the chosen experts sum to 1.
- Qwen3-MoE: norms on q and k as in Qwen3; some layers may stay dense (`dense_layers`); weights sum to 1 or, in
  some models, are left as the softmax gave them.
"""

from typing import ClassVar

import torch

from proto.model import ModelConfig
from worker.layers.experts import Mixture
from worker.layers.gemm_shape import GemmShape
from worker.layers.mlp import GatedMLP
from worker.layers.ops import Ops
from worker.models.llama import HUGGING_FACE_NAMES, Llama
from worker.ranks.group import Group


class Qwen3Moe(Llama):
    """See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.mlp.router.weight": "model.layers.{}.mlp.gate.weight",
        "layers.{}.mlp.experts.{}.gate.weight": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
        "layers.{}.mlp.experts.{}.up.weight": "model.layers.{}.mlp.experts.{}.up_proj.weight",
        "layers.{}.mlp.experts.{}.down.weight": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    }
    gguf_names: ClassVar[dict[str, str]] = {}

    def _mlp(self, config: ModelConfig, ops: Ops, group: Group, layer: int, dtype: torch.dtype) -> GatedMLP | Mixture:
        if layer in config.dense_layers:
            return super()._mlp(config, ops, group, layer, dtype)
        return Mixture(
            ops,
            group,
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            count=config.experts_per_token,
            renormalise=config.renormalise_experts,
            dtype=dtype,
        )

    @staticmethod
    def gemm_shapes(config: ModelConfig, dtype: torch.dtype, tokens: int, sampled: int) -> list[GemmShape]:
        hidden, inner = config.hidden_size, config.expert_size
        return [
            *Llama.gemm_shapes(config, dtype, tokens, sampled),
            GemmShape(config.num_experts, hidden, torch.float32, tokens),
            GemmShape(2 * inner, hidden, dtype, tokens),
            GemmShape(hidden, inner, dtype, tokens),
        ]


class Mixtral(Qwen3Moe):
    """The same mathematics under other names. See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.mlp.router.weight": "model.layers.{}.block_sparse_moe.gate.weight",
        "layers.{}.mlp.experts.{}.gate.weight": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
        "layers.{}.mlp.experts.{}.up.weight": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
        "layers.{}.mlp.experts.{}.down.weight": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
    }
