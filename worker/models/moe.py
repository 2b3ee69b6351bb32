"""Llama with mixtures of experts in place of MLPs.

- Mixtral (Jiang et al. 2024): every layer; weights of the chosen experts sum to 1.
- Qwen3-MoE: norms on q and k as in Qwen3; some layers may stay dense (`dense_layers`); weights sum to 1 or, in
  some models, are left as the softmax gave them.
"""

from typing import ClassVar

from proto.model import ModelConfig
from worker.layers.experts import Mixture
from worker.layers.mlp import GatedMLP
from worker.layers.module import Target
from worker.models.llama import HUGGING_FACE_NAMES, Llama


class Qwen3Moe(Llama):
    """See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        "layers.{}.mlp.experts.{}.gate_up.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "layers.{}.mlp.experts.{}.gate_up.up": "model.layers.{}.mlp.experts.{}.up_proj",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.mlp.experts.{}.down_proj",
    }
    gguf_names: ClassVar[dict[str, str]] = {}

    def _mlp(self, config: ModelConfig, target: Target, index: int) -> GatedMLP | Mixture:
        if index in config.dense_layers:
            return super()._mlp(config, target, index)
        return Mixture(
            target,
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            count=config.experts_per_token,
            renormalise=config.renormalise_experts,
        )


class Mixtral(Qwen3Moe):
    """The same mathematics under other names. See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
        "layers.{}.mlp.experts.{}.gate_up.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "layers.{}.mlp.experts.{}.gate_up.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    }
