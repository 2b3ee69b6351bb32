"""Phi-3 and Phi-3.5 (Abdin et al. 2024), Phi-4 and Phi-4-mini: Llama, with q, k and v in one tensor, gate and up too.

Windows, LongRoPE and heads of which only the first dimensions rotate are in the config.
"""

from typing import ClassVar

from worker.models.llama import HUGGING_FACE_NAMES, Llama


class Phi3(Llama):
    """See `worker.models.base.Model`."""

    hugging_face_names: ClassVar[dict[str, str]] = {
        **HUGGING_FACE_NAMES,
        "layers.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
        "layers.{}.mlp.gate_up": "model.layers.{}.mlp.gate_up_proj",
    }
    gguf_names: ClassVar[dict[str, str]] = {}
