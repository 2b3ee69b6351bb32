"""Configs of the newer families, held against transformers' own reading of the same file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from engine.models import ModelError, read_config
from proto.model import ModelConfig, RopeConfig
from tests.tiny_models import NEWER_FAMILIES, make_tiny
from worker.sim.roofline import Roofline, parse_gpu
from worker.steps.prompts import step

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 320}


def config_of(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": [architecture], "model_type": model_type, "dtype": "bfloat16", **changes}


def gemma2(**changes: Any) -> dict[str, Any]:
    return config_of("Gemma2ForCausalLM", "gemma2", **changes)


def gemma3(**changes: Any) -> dict[str, Any]:
    return config_of("Gemma3ForCausalLM", "gemma3_text", **changes)


def mixtral(**changes: Any) -> dict[str, Any]:
    return config_of("MixtralForCausalLM", "mixtral", **changes)


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    return config_of("Qwen3MoeForCausalLM", "qwen3_moe", **changes)


def read(directory: Path, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


@pytest.mark.parametrize(
    "config",
    [
        gemma2(),
        gemma2(sliding_window=100, query_pre_attn_scalar=144, head_dim=128, num_key_value_heads=8),
        gemma2(attn_logit_softcapping=None, final_logit_softcapping=12.0, tie_word_embeddings=False),
        gemma2(layer_types=["full_attention"] * 6 + ["sliding_attention"], rms_norm_eps=1e-5),
        gemma3(),
        gemma3(sliding_window_pattern=3, rope_theta=2e6, rope_local_base_freq=123.0),
        gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=512),
        gemma3(rope_parameters=ROPES, final_logit_softcapping=20.0),
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    ],
    ids=str,
)
def test_gemma(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, theirs = read(tmp_path, config), AutoConfig.from_pretrained(str(tmp_path))
    assert_sizes(ours, theirs)
    assert ours.hidden_act == theirs.hidden_activation
    assert ours.attention_scale == pytest.approx(theirs.query_pre_attn_scalar**-0.5)
    assert ours.attention_soft_cap == (theirs.attn_logit_softcapping or 0.0)
    assert ours.logit_soft_cap == (theirs.final_logit_softcapping or 0.0)
    windows = tuple(theirs.sliding_window if t == "sliding_attention" else 0 for t in theirs.layer_types)
    assert ours.windows == windows
    ropes = theirs.rope_parameters
    if theirs.model_type == "gemma2":
        assert ours.rope == rope(ropes)
        assert ours.windowed_rope is None
    else:
        assert (ours.rope, ours.windowed_rope) == (rope(ropes["full_attention"]), rope(ropes["sliding_attention"]))


def rope(values: dict[str, Any]) -> RopeConfig:
    return RopeConfig(type=values["rope_type"], theta=values["rope_theta"], factor=values.get("factor", 1.0))


def assert_sizes(ours: ModelConfig, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_the_text_part_of_gemma_3_with_a_vision_tower(tmp_path: Path) -> None:
    """As Google ships it: the text's config says little and leans on defaults."""
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "model_type": "gemma3_text", "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    ours, theirs = read(tmp_path, whole), AutoConfig.from_pretrained(str(tmp_path)).text_config
    assert_sizes(ours, theirs)
    assert ours.dtype == "bfloat16"
    assert ours.windows == (1024,) * 5 + (0,) + (1024,) * 5 + (0,) + ours.windows[12:]
    assert ours.rope == RopeConfig(type="linear", theta=1e6, factor=8.0)
    assert ours.windowed_rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    "config",
    [
        mixtral(),
        mixtral(num_local_experts=4, num_experts_per_tok=1, rope_theta=5e5, sliding_window=64),
        qwen3_moe(),
        qwen3_moe(num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, moe_intermediate_size=32, head_dim=128),
        qwen3_moe(decoder_sparse_step=3, mlp_only_layers=[2]),
        qwen3_moe(use_sliding_window=True, sliding_window=64),
    ],
    ids=str,
)
def test_mixtures(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, theirs = read(tmp_path, config), AutoConfig.from_pretrained(str(tmp_path))
    assert_sizes(ours, theirs)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.num_experts == theirs.num_experts
    assert ours.experts_per_token == theirs.num_experts_per_tok
    assert ours.expert_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.renormalise_experts == getattr(theirs, "norm_topk_prob", True)
    assert ours.qk_norm == (ours.family == "qwen3_moe")
    step, named = getattr(theirs, "decoder_sparse_step", 1), getattr(theirs, "mlp_only_layers", [])
    assert ours.dense_layers == tuple(n for n in range(7) if n in named or (n + 1) % step)
    assert ours.windows == ((theirs.sliding_window,) * 7 if theirs.sliding_window else ())


def phi3(**changes: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.5], "long_factor": [1, 30.25]}
    rope = {"type": changes.pop("kind", "longrope"), **factors}
    return config_of(
        "Phi3ForCausalLM",
        "phi3",
        **{"partial_rotary_factor": 0.5, "rope_scaling": rope, "original_max_position_embeddings": 64, **changes},
    )


def test_phi3(tmp_path: Path) -> None:
    """Half of 8 dimensions rotate; older files call LongRoPE by other names, which transformers 5 stumbles over."""
    ours, theirs = read(tmp_path, phi3(sliding_window=100)), AutoConfig.from_pretrained(str(tmp_path))
    assert_sizes(ours, theirs)
    assert ours.windows == (theirs.sliding_window,) * 7
    assert ours.rotary_dim == 4
    assert theirs.rope_parameters["rope_type"] == ours.rope.type == "longrope"
    assert list(ours.rope.short_factors) == theirs.rope_parameters["short_factor"]
    assert list(ours.rope.long_factors) == theirs.rope_parameters["long_factor"]
    assert ours.rope.original_max_position == theirs.rope_parameters["original_max_position_embeddings"]
    assert ours.rope.factor == 512 / 64
    assert all(read(tmp_path, phi3(kind=kind)).rope == ours.rope for kind in ("su", "yarn"))
    assert read(tmp_path, config_of("Phi3ForCausalLM", "phi3", rms_norm_eps=None)).norm_eps == 1e-5


def test_olmo2_and_granite(tmp_path: Path) -> None:
    olmo = read(tmp_path, config_of("Olmo2ForCausalLM", "olmo2", attention_bias=True))
    assert_sizes(olmo, AutoConfig.from_pretrained(str(tmp_path)))
    assert (olmo.wide_qk_norm, olmo.qk_norm, olmo.qkv_bias, olmo.out_bias, olmo.mlp_bias) == (
        True,
        False,
        True,
        True,
        False,
    )
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125}
    granite = read(tmp_path, config_of("GraniteForCausalLM", "granite", logits_scaling=8.0, mlp_bias=True, **factors))
    theirs = AutoConfig.from_pretrained(str(tmp_path))
    assert_sizes(granite, theirs)
    assert (granite.mlp_bias, granite.qkv_bias) == (theirs.mlp_bias, theirs.attention_bias)
    assert granite.attention_scale == theirs.attention_multiplier
    assert granite.embedding_multiplier == theirs.embedding_multiplier
    assert granite.residual_multiplier == theirs.residual_multiplier
    assert granite.logit_divisor == theirs.logits_scaling


@pytest.mark.parametrize(
    "config",
    [
        {**BLOOM, "n_layer": 3, "n_head": 4, "hidden_size": 64, "layer_norm_epsilon": 1e-6},
        {**BLOOM, "num_hidden_layers": 3, "num_attention_heads": 8, "n_embed": 64, "tie_word_embeddings": False},
    ],
    ids=["n_head", "n_embed"],
)
def test_bloom(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, theirs = read(tmp_path, config), AutoConfig.from_pretrained(str(tmp_path))
    assert ours.alibi
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (3, theirs.num_attention_heads, ours.num_heads)
    assert (ours.hidden_size, ours.intermediate_size) == (64, 256)
    assert ours.head_dim * ours.num_heads == 64
    assert ours.norm_eps == theirs.layer_norm_epsilon
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == 2048
    assert read(tmp_path, {**config, "seq_length": 77}).max_position_embeddings == 77


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gemma2(hidden_activation="gelu"), ["hidden_activation", "'gelu'", "gelu_pytorch_tanh"]),
        (gemma2(use_bidirectional_attention=True), ["use_bidirectional_attention"]),
        (gemma2(attn_logit_softcapping=-1.0), ["attn_logit_softcapping", "-1"]),
        (gemma2(query_pre_attn_scalar=0), ["query_pre_attn_scalar", "0"]),
        (gemma2(layer_types=["full_attention"]), ["layer_types", "num_hidden_layers = 7"]),
        (gemma3(attn_logit_softcapping=50.0), ["attn_logit_softcapping"]),
        (gemma3(rope_parameters={"full_attention": [1]}), ["full_attention", "[1]"]),
        (gemma3(rope_scaling={"rope_type": "mrope", "factor": 2.0}), ["rope_type", "mrope"]),
        (phi3(partial_rotary_factor=0.4), ["partial_rotary_factor", "0.4 of 8 dimensions is 3", "even"]),
        (phi3(partial_rotary_factor=1.0), ["rope_scaling.short_factor", "4 numbers"]),
        (phi3(original_max_position_embeddings=None), ["original_max_position_embeddings", "missing"]),
        (mixtral(num_local_experts=2, num_experts_per_tok=3), ["num_experts_per_tok", "3", "num_local_experts 2"]),
        (mixtral(num_local_experts=0), ["num_local_experts", "0"]),
        (qwen3_moe(mlp_only_layers=["x"]), ["mlp_only_layers", "x"]),
        (qwen3_moe(decoder_sparse_step=0), ["decoder_sparse_step", "0"]),
        ({**BLOOM, "n_layer": 2, "n_head": 5, "hidden_size": 64}, ["hidden_size", "64", "n_head 5"]),
        (
            {**BLOOM, "n_layer": 2, "n_head": 4, "hidden_size": 64, "apply_residual_connection_post_layernorm": True},
            ["apply_residual_connection_post_layernorm"],
        ),
        ({**BLOOM, "n_head": 4, "hidden_size": 64}, ["n_layer", "missing"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, config)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_parameters_are_counted_to_the_last(tmp_path: Path, family: str) -> None:
    """By the estimate, and by the simulated device."""
    changes: dict[str, Any] = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    directory = make_tiny(tmp_path, family, tie=family != "mixtral", **changes)
    config = read_config(str(directory))
    held = sum(tensor.numel() for tensor in load_file(directory / "model.safetensors").values())
    assert config.parameters == held
    assert Roofline(config, parse_gpu("sim:h200"), 1).weight_bytes == held


def test_a_simulated_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    """One token reads its own few, hundreds of tokens read all; each computes its own few."""
    dense = read(tmp_path, qwen3_moe(mlp_only_layers=list(range(7)), intermediate_size=96))
    mixed = read(tmp_path, qwen3_moe(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24))
    # Four experts of 24 are one MLP of 96: a token's arithmetic is the same, but for the router.
    gpu = parse_gpu("sim:custom,bandwidth=1,flops=1e30,memory=1e9,launch=0")
    router, expert = 7 * 64 * 16, 7 * 3 * 64 * 24
    for tokens, experts_read in ((1, 4), (1000, 16)):
        batch = step([np.zeros(tokens, np.int32)], 16)
        extra = Roofline(mixed, gpu, 1).seconds(batch) - Roofline(dense, gpu, 1).seconds(batch)
        assert extra == pytest.approx(router + (experts_read - 4) * expert)
    gpu = parse_gpu("sim:custom,bandwidth=1e30,flops=1,memory=1e9,launch=0")
    batch = step([np.zeros(10, np.int32)], 16)
    extra = Roofline(mixed, gpu, 1).seconds(batch) - Roofline(dense, gpu, 1).seconds(batch)
    assert extra == pytest.approx(2 * 10 * router)
