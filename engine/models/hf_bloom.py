"""BLOOM → ModelConfig."""

from engine.models.fields import Fields
from engine.models.hf_parts import dtype_of, hidden_per_head
from proto.model import ModelConfig

_TRAINED = 2048  # positions; ALiBi reaches further, but no further than was ever tried


def bloom_config(config: Fields, weights_dtype: str | None) -> ModelConfig:
    """Raises ModelError naming file and key. Sizes have two names each, an older and a newer one."""
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
        max_position_embeddings=config.integer("seq_length", _TRAINED),
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        alibi=True,
        dtype=dtype_of(config, weights_dtype),
    )
