"""Hugging Face's config.json → ModelConfig.

Covers the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5
(`rope_parameters`, `dtype`), with transformers' defaults. What it cannot honour, it refuses.
"""

from engine.models.errors import ModelError
from engine.models.fields import Fields
from engine.models.hf_bloom import bloom_config
from engine.models.hf_gemma import gemma2_config, gemma3_config
from engine.models.hf_llama import llama_config
from proto.model import ModelConfig

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
