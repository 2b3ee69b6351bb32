"""Hugging Face's config.json → ModelConfig.

Covers the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`), with transformers' defaults. What it cannot honour, it refuses.
"""

from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.hf_gemma import gemma2_config, gemma3_config
from engine.models.hf_llama import llama_config
from engine.models.hf_parts import dtype_of, hidden_per_head
from proto.model import ModelConfig

_BLOOM_TRAINED = 2048  # positions; ALiBi reaches further, but no further than was ever tried


def bloom_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Read a config in which sizes have two names each, an older and a newer one. Raises ModelError."""
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise config.error("apply_residual_connection_post_layernorm", "is not supported")
    hidden_key, heads_key, layers_key = (
        old if config.has(old) else new
        for old, new in (
            ("n_embed", "hidden_size"),
            ("num_attention_heads", "n_head"),
            ("num_hidden_layers", "n_layer"),
        )
    )
    hidden_size, num_heads = config.integer(hidden_key), config.integer(heads_key)
    return ModelConfig(
        family="bloom",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=config.integer(layers_key),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_per_head(config, hidden_size, num_heads, heads_key=heads_key),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=config.integer("seq_length", _BLOOM_TRAINED),
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        alibi=True,
        dtype=dtype_of(config, weights_dtype),
    )


_LLAMA_LIKE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
}
_OTHERS = {
    "Gemma2ForCausalLM": gemma2_config,
    "Gemma3ForCausalLM": gemma3_config,
    "Gemma3ForConditionalGeneration": gemma3_config,
    "BloomForCausalLM": bloom_config,
}


def model_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Read a decoder's shape. `weights_dtype` is what the weight files hold, for configs that name none.

    Raises ModelError naming file and key.
    """
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise config.error("architectures", f"must name one architecture, is {architectures!r}")
    name = architectures[0]
    if name not in _LLAMA_LIKE and name not in _OTHERS:
        raise config.error("architectures", f"names {name}; supported: {', '.join([*_LLAMA_LIKE, *_OTHERS])}")
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set: quantised Hugging Face checkpoints are not supported yet")
    if name in _LLAMA_LIKE:
        return llama_config(config, _LLAMA_LIKE[name], weights_dtype)
    return _OTHERS[name](config, weights_dtype)


def check_ids(path: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises ModelError when an end id lies outside the vocabulary."""
    for token_id in ids:
        if token_id >= vocab_size:
            raise ModelError(f"{path}: end-of-text id {token_id} is outside the vocabulary of {vocab_size}")
