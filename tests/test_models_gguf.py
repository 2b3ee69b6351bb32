"""GGUF files: shape from metadata, Llama 3's scaling from its tensor, damage of every sort."""

import math
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models import ModelError, prepare, read_config
from engine.models.gguf_file import read_header
from proto.model import RopeConfig
from tests import tiny_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_CACHE", str(tmp_path / "cache"))


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata() | {"some.flags": [True, False], "some.f64": 0.5})
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert [(name, t.shape, t.type, t.offset, t.num_bytes) for name, t in header.tensors.items()] == [
        (t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type, t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]


@pytest.mark.parametrize(
    ("architecture", "changes", "extra", "expected"),
    [
        ("llama", {}, [], {"family": "llama", "head_dim": 16, "num_kv_heads": 2, "tie_word_embeddings": True}),
        ("llama", {"attention__head_count_kv": ...}, [], {"num_kv_heads": 4}),
        ("llama", {"attention__head_count_kv": [2, 2]}, [], {"num_kv_heads": 2}),
        ("llama", {"rope__freq_base": ...}, ["output.weight"], {"tie_word_embeddings": False}),
        ("llama", {"attention__sliding_window": 512}, [], {"family": "mistral", "windows": (512, 512)}),
        ("qwen2", {}, ["blk.0.attn_q.bias"], {"family": "qwen2", "qkv_bias": True, "out_bias": False}),
        (
            "qwen3",
            {"attention__key_length": 32, "attention__value_length": 32},
            ["blk.0.attn_q_norm.weight"],
            {"family": "qwen3", "head_dim": 32, "qk_norm": True, "qkv_bias": False},
        ),
    ],
)
def test_shape(
    tmp_path: Path, architecture: str, changes: dict[str, Any], extra: list[str], expected: dict[str, Any]
) -> None:
    weights = tiny_gguf.tensors() | {name: np.zeros(64, np.float32) for name in extra}
    keys = tiny_gguf.metadata(architecture, **changes)
    path = tiny_gguf.write(tmp_path / "m.gguf", keys, weights=weights, architecture=architecture)
    config = read_config(str(path))
    always = {"vocab_size": 258, "hidden_size": 64, "num_layers": 2, "max_position_embeddings": 1024}
    assert {key: getattr(config, key) for key in expected | always} == expected | always


def test_dtype_is_that_of_most_weights(tmp_path: Path) -> None:
    halves = tiny_gguf.write(tmp_path / "f16.gguf")
    assert read_config(str(halves)).dtype == "float16"
    floats = tiny_gguf.write(tmp_path / "f32.gguf", weights=tiny_gguf.tensors(dtype=np.float32))
    assert read_config(str(floats)).dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig()),
        ({"scaling__type": "none"}, RopeConfig()),
        ({"scaling__type": "linear", "scaling__factor": 2.0}, RopeConfig(type="linear", factor=2.0)),
        ({"scale_linear": 2.0}, RopeConfig(type="linear", factor=2.0)),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 256},
            RopeConfig(type="yarn", factor=4.0, original_max_position=256),
        ),
        (
            {
                "scaling__type": "yarn",
                "scaling__factor": 4.0,
                "scaling__original_context_length": 256,
                "scaling__yarn_attn_factor": 0.5,
                "scaling__yarn_beta_fast": 16.0,
            },
            RopeConfig(
                type="yarn",
                factor=4.0,
                original_max_position=256,
                beta_fast=16.0,
                attention_factor=0.5 * (0.1 * math.log(4.0) + 1.0),
            ),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    keys = tiny_gguf.metadata(**{f"rope__{key}": value for key, value in changes.items()})
    assert read_config(str(tiny_gguf.write(tmp_path / "m.gguf", keys))).rope == expected


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float = 1.0) -> np.ndarray[Any, Any]:
    """As converters compute them: one frequency after the other, by wavelength."""
    original, high = 8192, 4.0
    divisors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (dim / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path, factor: float) -> None:
    keys = tiny_gguf.metadata(rope__freq_base=500000.0, attention__key_length=64, attention__value_length=64)
    weights = tiny_gguf.tensors() | {"rope_freqs.weight": llama3_divisors(500000.0, 64, factor)}
    rope = read_config(str(tiny_gguf.write(tmp_path / "m.gguf", keys, weights=weights))).rope
    assert rope == RopeConfig(type="llama3", theta=500000.0, factor=factor, original_max_position=8192)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    keys = tiny_gguf.metadata(rope__freq_base=500000.0)
    for divisors in (llama3_divisors(500000.0, 16, 8.0, low=2.0), np.ones(3, np.float32)):
        weights = tiny_gguf.tensors() | {"rope_freqs.weight": divisors}
        path = tiny_gguf.write(tmp_path / "m.gguf", keys, weights=weights)
        with pytest.raises(ModelError, match=r"rope_freqs\.weight does not hold the divisors"):
            read_config(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": ...}, ["llama.block_count", "missing"]),
        ({"embedding_length": 32}, ["embedding_length", "32"]),
        ({"attention__head_count": 3}, ["embedding_length", "head_count 3"]),
        ({"attention__head_count_kv": 3}, ["head_count_kv", "3"]),
        ({"attention__head_count_kv": [2, 4]}, ["head_count_kv", "[2, 4]"]),
        ({"rope__dimension_count": 8}, ["rope.dimension_count", "8"]),
        ({"expert_count": 8}, ["expert_count"]),
        ({"rope__scaling__type": "longrope"}, ["rope.scaling.type", "longrope"]),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, ["original_context_length", "missing"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata(**changes))
    with pytest.raises(ModelError) as caught:
        prepare(str(path))
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_unknown_architectures_and_parts_of_files_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata("phi3"), architecture="phi3")
    with pytest.raises(ModelError, match=r"general\.architecture 'phi3' is not supported"):
        prepare(str(path))
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.metadata() | {"split.count": 3})
    with pytest.raises(ModelError, match=r"split\.count"):
        prepare(str(path))


# End ids and template


def test_end_ids_of_text_and_turn(tmp_path: Path) -> None:
    tokens = tiny_gguf.byte_level_tokens()
    tokens["tokenizer.ggml.tokens"] = [*tokens["tokenizer.ggml.tokens"], "<|eot_id|>", "<|eom_id|>", "<|im_end|>"]
    tokens["tokenizer.ggml.token_type"] = [*tokens["tokenizer.ggml.token_type"], 3, 3, 3]
    tokens |= {"tokenizer.ggml.eom_token_id": 259, "tokenizer.chat_template": "{{ x }}<|eot_id|>"}
    path = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tokens, weights=tiny_gguf.tensors(261))
    manifest = prepare(str(path))
    assert manifest.eos_ids == (257, 259, 258)
    assert (manifest.eos_token, manifest.bos_token) == ("<|end|>", "")
    assert manifest.chat_template == "{{ x }}<|eot_id|>"
    assert (manifest.weight_format, manifest.weight_files) == ("gguf", (str(path),))
    assert prepare(str(path), weights_needed=False).weight_format == "none"


def test_an_end_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokens = tiny_gguf.byte_level_tokens() | {"tokenizer.ggml.eos_token_id": 258}
    with pytest.raises(ModelError, match="258 is outside the vocabulary of 258"):
        prepare(str(tiny_gguf.write(tmp_path / "m.gguf", tokenizer=tokens)))


# Damage


def test_truncation_is_found_from_the_header(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 1024])
    with pytest.raises(ModelError, match=r"m\.gguf is truncated: tensor \S+ ends at byte"):
        prepare(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "damaged"), (b"GGU", "not a GGUF"), (b"PK\3\4" * 100, "not a GGUF"), (b"GGUF" + b"\x63\0\0\0" * 9, "99")],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        prepare(str(path))


def test_a_huge_array_length_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62)  # an array of 2^62 uint32
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry + b"\0" * 64)
    start = time.perf_counter()
    with pytest.raises(ModelError, match="runs past the end"):
        prepare(str(path))
    assert time.perf_counter() - start < 1.0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_header_escapes_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    """Any byte changed, any end cut: the file is read, or refused with a ModelError that names it."""
    path = tmp_path / "m.gguf"
    if not path.exists():
        tiny_gguf.write(path)
    whole = path.read_bytes()
    end = len(whole) - 3 * (258 * 64 * 2) // 4
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(broken[: data.draw(st.sampled_from([len(broken), end]))])
    try:
        prepare(str(damaged))
    except ModelError as error:
        assert str(damaged) in str(error)  # noqa: PT017 - most damage is refused, some reads as another file
