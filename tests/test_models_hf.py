"""Hugging Face directories: config.json against transformers' own reading, damaged and missing files, text files."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from engine.models import ModelError, prepare, read_config
from proto.model import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def variant(architecture: str, **changes: Any) -> dict[str, Any]:
    """LLAMA as another architecture; a change to ... leaves the key out."""
    family = architecture.removesuffix("ForCausalLM").lower()
    merged = {**LLAMA, "architectures": [architecture], "model_type": family, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_model(directory: Path, config: dict[str, Any] = LLAMA) -> Path:
    """A directory whose every file is whole; the weights are one tensor, as only headers are looked at."""
    write_config(directory, config)
    vocab = {"<s>": 0, "</s>": 1, "<|im_end|>": 2, "a": 3, "b": 4}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(directory / "tokenizer.json"))
    save_file({"w": np.zeros((4, 256), np.float32)}, str(directory / "model.safetensors"))
    return directory


# Shape


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"family": "llama", "head_dim": 16, "num_kv_heads": 2, "qkv_bias": False, "windows": ()}),
        (variant("LlamaForCausalLM", num_key_value_heads=...), {"num_kv_heads": 4}),
        (variant("LlamaForCausalLM", head_dim=32), {"head_dim": 32}),
        (variant("LlamaForCausalLM", attention_bias=True, mlp_bias=True), {"qkv_bias": True, "out_bias": True}),
        (variant("LlamaForCausalLM", mlp_bias=True), {"mlp_bias": True, "qkv_bias": False}),
        (variant("LlamaForCausalLM", rms_norm_eps=...), {"norm_eps": 1e-6}),
        (variant("LlamaForCausalLM", tie_word_embeddings=True), {"tie_word_embeddings": True}),
        (variant("MistralForCausalLM", sliding_window=256), {"family": "mistral", "windows": (256,) * 4}),
        (variant("MistralForCausalLM", sliding_window=None), {"windows": ()}),
        (variant("MistralForCausalLM"), {"windows": (4096,) * 4}),
        (variant("MistralForCausalLM", num_attention_heads=16, num_key_value_heads=...), {"num_kv_heads": 8}),
        (variant("Qwen2ForCausalLM"), {"family": "qwen2", "qkv_bias": True, "out_bias": False, "windows": ()}),
        (variant("Qwen2ForCausalLM", sliding_window=64, max_window_layers=2), {"windows": ()}),
        (
            variant("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64, max_window_layers=3),
            {"windows": (0, 0, 0, 64)},
        ),
        (
            variant(
                "Qwen2ForCausalLM",
                use_sliding_window=True,
                sliding_window=64,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            {"windows": (64, 0, 64, 0)},
        ),
        (variant("Qwen3ForCausalLM"), {"family": "qwen3", "head_dim": 128, "qk_norm": True, "qkv_bias": False}),
        (variant("Qwen3ForCausalLM", head_dim=16, attention_bias=True), {"head_dim": 16, "out_bias": True}),
    ],
)
def test_shape_is_read_as_transformers_reads_it(
    tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    ours = read_config(str(write_config(tmp_path, config)))
    assert {key: getattr(ours, key) for key in expected} == expected

    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(str(tmp_path))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    if hasattr(theirs, "head_dim"):
        assert ours.head_dim == theirs.head_dim
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    window = getattr(theirs, "sliding_window", None) or 0
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    assert ours.windows == (windows if any(windows) else ())


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
def test_either_spelling_of_dtype(tmp_path: Path, spelling: str) -> None:
    config = variant("LlamaForCausalLM", **{"torch_dtype": ..., spelling: "float16"})
    assert read_config(str(write_config(tmp_path, config))).dtype == "float16"


def test_a_config_without_dtype_takes_that_of_the_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path, variant("LlamaForCausalLM", torch_dtype=...))
    assert prepare(str(directory)).config.dtype == "float32"


# RoPE

LINEAR = {"factor": 4.0}
DYNAMIC = {"factor": 2.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
YARN_FULL = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}
LONGROPE = {"original_max_position_embeddings": 256, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("default", {}, RopeConfig(theta=5e5)),
        ("linear", LINEAR, RopeConfig(type="linear", theta=5e5, factor=4.0)),
        ("dynamic", DYNAMIC, RopeConfig(type="dynamic", theta=5e5, factor=2.0, original_max_position=1024)),
        ("llama3", LLAMA3, RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_position=256)),
        ("yarn", {"factor": 4.0}, RopeConfig(type="yarn", theta=5e5, factor=4.0, original_max_position=1024)),
        ("yarn", YARN, RopeConfig(type="yarn", theta=5e5, factor=4.0, original_max_position=256)),
        (
            "yarn",
            YARN_FULL,
            RopeConfig(
                type="yarn",
                theta=5e5,
                factor=4.0,
                original_max_position=256,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.7,
                mscale_all_dim=0.9,
                truncate=False,
            ),
        ),
        (
            "longrope",
            LONGROPE,
            RopeConfig(
                type="longrope",
                theta=5e5,
                factor=4.0,  # 1024 positions / 256
                original_max_position=256,
                short_factors=(1.0,) * 8,
                long_factors=(2.0,) * 8,
            ),
        ),
    ],
)
def test_rope_in_every_spelling(
    tmp_path: Path, spelling: str, kind: str, values: dict[str, Any], expected: RopeConfig
) -> None:
    if spelling == "rope_parameters":
        parameters = {"rope_type": kind, "rope_theta": 5e5, **values}
        config = variant("LlamaForCausalLM", rope_theta=..., rope_parameters=parameters)
    else:
        config = variant("LlamaForCausalLM", rope_scaling={spelling: kind, **values})
    assert read_config(str(write_config(tmp_path, config))).rope == expected

    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(str(tmp_path)).rope_parameters
    assert theirs["rope_type"] == expected.type
    assert theirs["rope_theta"] == expected.theta
    if kind in ("llama3", "yarn", "longrope"):
        assert theirs["original_max_position_embeddings"] == expected.original_max_position


def test_theta_defaults_to_ten_thousand(tmp_path: Path) -> None:
    assert read_config(str(write_config(tmp_path, variant("LlamaForCausalLM", rope_theta=...)))).rope.theta == 10000.0


# Refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": ...}, ["architectures"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"vocab_size": ...}, ["vocab_size", "missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads", "4"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"intermediate_size": True}, ["intermediate_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, ["rope_type", "proportional", "yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["original_max_position_embeddings", "missing"]),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "long_factor": [1.0]}}, ["long_factor", "8 numbers"]),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "short_factor": [0] * 8}}, ["short_factor[0]", "0"]),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["type", "su"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling.factor", "-1"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, ["mrope"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    directory = write_config(tmp_path, variant("LlamaForCausalLM", **changes))
    with pytest.raises(ModelError) as caught:
        read_config(str(directory))
    for word in [str(directory / "config.json"), *words]:
        assert word in str(caught.value)


def test_windows_without_a_size_are_refused(tmp_path: Path) -> None:
    config = variant("Qwen2ForCausalLM", layer_types=["sliding_attention"] * 4)
    with pytest.raises(ModelError, match="layer_types contains sliding_attention"):
        read_config(str(write_config(tmp_path, config)))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def set_header_length(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: cut(p, p.stat().st_size - 1024), ["truncated"]),
        (lambda p: cut(p, 5), ["damaged"]),
        (lambda p: cut(p, 0), ["damaged"]),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), ["trailing bytes"]),
        (lambda p: set_header_length(p, 1 << 60), ["damaged", str(1 << 60)]),
        (lambda p: set_header_length(p, 3), ["damaged"]),
        (lambda p: p.write_bytes(struct.pack("<Q", 100_005) + b'{"a":' + b"[" * 100_000), ["damaged"]),
        (lambda p: p.unlink(), ["neither"]),
    ],
)
def test_damaged_weights_are_found_from_their_header(tmp_path: Path, damage: Any, words: list[str]) -> None:
    directory = write_model(tmp_path)
    damage(directory / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        prepare(str(directory))
    for word in ["model.safetensors", *words]:
        assert word in str(caught.value)


def write_shards(directory: Path) -> Path:
    write_model(directory)
    (directory / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        save_file({name: np.zeros(4, np.float16)}, str(directory / name))
    index = {"metadata": {"total_size": 16}, "weight_map": {name: name for name in reversed(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_shards_are_listed_once_in_order(tmp_path: Path) -> None:
    manifest = prepare(str(write_shards(tmp_path)))
    assert [Path(f).name for f in manifest.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_shards(tmp_path)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing; .*index\.json names it"):
        prepare(str(directory))


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    directory = write_shards(tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(ModelError, match=r"\.\./x\.safetensors"):
        prepare(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_damaged_text_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    path = write_model(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ModelError) as caught:
        prepare(str(tmp_path))
    assert str(path) in str(caught.value)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    for name in ("nothing", str(tmp_path / "nothing"), str(tmp_path / "x.gguf")):
        with pytest.raises(ModelError, match="does not exist"):
            prepare(name)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"notes\.txt is neither"):
        prepare(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelError, match="config without weights"):
        prepare(str(write_config(tmp_path, LLAMA) / "config.json"))


@pytest.mark.parametrize("name", ["", "~nobody-of-that-name/m", "x" * 5000, "a\0b", "/proc/1/mem/x"])
def test_odd_names_are_refused_like_others(name: str) -> None:
    with pytest.raises(ModelError):
        prepare(name)


def test_a_name_on_the_hub_without_network_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"cannot get model no-such/model: .*fetching it from .* failed: .*ffline"):
        prepare("no-such/model")


# Text: end ids, special tokens, chat template


def write_text_files(directory: Path, **documents: dict[str, Any]) -> Path:
    write_model(directory, {**LLAMA, "eos_token_id": 1})
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return directory


def test_end_ids_of_all_three_sources_are_merged(tmp_path: Path) -> None:
    write_text_files(
        tmp_path,
        generation_config={"eos_token_id": [1, 3]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
    )
    manifest = prepare(str(tmp_path))
    assert manifest.eos_ids == (1, 3, 2)
    assert (manifest.bos_token, manifest.eos_token) == ("<s>", "<|im_end|>")


def test_an_end_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_text_files(tmp_path, generation_config={"eos_token_id": [128]})
    with pytest.raises(ModelError, match="128 is outside the vocabulary of 128"):
        prepare(str(tmp_path))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("T", "T"),
        ([{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}], "T"),
        ([{"name": "tool_use", "template": "T"}], "T"),
        (None, None),
    ],
)
def test_chat_template_from_the_tokenizer_config(tmp_path: Path, value: Any, expected: str | None) -> None:
    write_text_files(tmp_path, tokenizer_config={"chat_template": value})
    assert prepare(str(tmp_path)).chat_template == expected


def test_a_template_file_wins(tmp_path: Path) -> None:
    write_text_files(tmp_path, tokenizer_config={"chat_template": "T"})
    (tmp_path / "chat_template.jinja").write_text("{{ file }}")
    assert prepare(str(tmp_path)).chat_template == "{{ file }}"


def test_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    named = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
    write_text_files(tmp_path, tokenizer_config={"chat_template": named})
    with pytest.raises(ModelError, match="no template named default, only a, b"):
        prepare(str(tmp_path))


# Without weights


def test_a_bare_config_gets_a_synthetic_tokenizer(tmp_path: Path) -> None:
    path = write_config(tmp_path, variant("LlamaForCausalLM", vocab_size=1000, eos_token_id=[7, 999])) / "config.json"
    manifest = prepare(str(path.rename(tmp_path / "llama.json")), weights_needed=False)
    assert (manifest.weight_format, manifest.weight_files, manifest.eos_ids) == ("none", (), (7, 999))
    tokenizer = Tokenizer.from_file(manifest.tokenizer_json)
    assert tokenizer.get_vocab_size() == 1000
    text = "Grüße, 世界! 😀\n\t\x00"
    ids = tokenizer.encode(text).ids
    assert not {7, 999} & set(ids)
    assert tokenizer.decode(ids) == text
    for token_id in set(range(1000)) - {7, 999}:
        assert tokenizer.decode([token_id])
    assert tokenizer.decode([7, 999]) == ""
    assert tokenizer.decode([7], skip_special_tokens=False) == manifest.eos_token


@pytest.mark.parametrize("vocab_size", [4, 100, 256, 257, 151936])
def test_synthetic_vocabularies_of_any_size(tmp_path: Path, vocab_size: int) -> None:
    directory = write_config(tmp_path, variant("LlamaForCausalLM", vocab_size=vocab_size, eos_token_id=2))
    manifest = prepare(str(directory), weights_needed=False)
    tokenizer = Tokenizer.from_file(manifest.tokenizer_json)
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert len(tokenizer.encode("any text").ids) == len("any text")


def test_a_tokenizer_beside_the_config_is_used_without_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    (directory / "model.safetensors").unlink()
    assert prepare(str(directory), weights_needed=False).tokenizer_json == str(directory / "tokenizer.json")
