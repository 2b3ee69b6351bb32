"""Tiny random models as Hugging Face directories, made by transformers, which is then their reference."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "bloom": (BloomConfig, BloomForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NEWER_FAMILIES = ("mixtral", "qwen3_moe", "gemma2", "gemma3", "bloom", "phi3", "olmo2", "granite")
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    # Caps low enough to bend these small scores and logits.
    "gemma2": {
        "query_pre_attn_scalar": 40,
        "sliding_window": 40,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "query_pre_attn_scalar": 40,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3": {
        "sliding_window": 40,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        "pad_token_id": None,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "bloom": {"n_layer": 3, "n_head": 6, "hidden_size": 96},
}
MAX_POSITION = 512
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def rope_parameters(rope: str, theta: float = 10000.0) -> dict[str, Any]:
    """As transformers 5 spells them in config.json."""
    return {"rope_type": rope, "rope_theta": theta, **ROPES[rope]}


def make_tiny(
    directory: Path,
    family: str = "llama",
    *,
    rope: str = "default",
    window: int = 0,
    tie: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write config.json, model.safetensors and a byte-level tokenizer.json; returns the directory.

    `window` > 0 gives Mistral a sliding window, and Qwen one in its last layer. `changes` go into the config.
    """
    config_class, model_class = _CLASSES[family]
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope_parameters(rope),
        "tie_word_embeddings": tie,
        "initializer_range": 0.15,  # far enough from uniform logits to show mistakes
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if family == "mistral":
        values["sliding_window"] = window or None
    elif family in _OWN:
        values |= _OWN[family]
    elif window:
        values |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    config: PretrainedConfig = config_class(**(values | changes))
    torch.manual_seed(seed)
    model = model_class(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # transformers starts them at 0 and 1, where mistakes hide
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    _byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the directory, with plain attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrite keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<|end|>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
