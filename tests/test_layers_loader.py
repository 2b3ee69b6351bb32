"""Checkpoints: every parameter exactly once, or a refusal that names what is wrong (K59 to K61); GGUF."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from engine.models import prepare
from proto.model import ModelConfig, ModelManifest, RopeConfig
from tests.layer_cases import Player, load, prompt
from tests.tiny_models import edit_config, make_tiny, reference_model
from worker.device import DeviceError
from worker.loader import LoadError
from worker.loader.gguf_checkpoint import GgufCheckpoint, unpermute
from worker.steps.batch import I32Array

Type: Any = gguf.GGMLQuantizationType


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


def rewrite(directory: Path, change: Any) -> ModelManifest:
    """Apply `change` to the dict of tensors, save, and read the manifest."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return prepare(str(directory))


def logits(forward: Any, ids: I32Array) -> torch.Tensor:
    return Player(forward, 1, 64).run({0: (ids, 0)}, every_token=True)


def test_untied_without_head_is_refused_by_name(tiny: Path) -> None:
    manifest = rewrite(tiny, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r"missing: lm_head\.weight$"):
        load(manifest)


def test_tied_loads_with_and_without_head(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, tie=True)
    ids = prompt(20, 320, seed=1)
    without = logits(load(prepare(str(directory))), ids)
    manifest = rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(manifest), ids), without)


def test_every_misfit_is_listed(tiny: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(31, 96)
        tensors["model.layers.2.self_attn.o_proj.weight"] = torch.zeros(96, 96, dtype=torch.int8)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old files have it: not a misfit

    manifest = rewrite(tiny, spoil)
    with pytest.raises(LoadError) as caught:
        load(manifest)
    text = str(caught.value)
    assert "missing: model.layers.0.mlp.up_proj.weight;" in text
    assert "unexpected: model.layers.0.mlp.up.weight;" in text
    assert "model.layers.1.self_attn.k_proj.weight (is F32 [31, 96], wanted a float [32, 96])" in text
    assert "model.layers.2.self_attn.o_proj.weight (is I8 [96, 96], wanted a float [96, 96])" in text
    assert "inv_freq" not in text


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_a_damaged_file_is_named(tiny: Path, damage: str) -> None:
    manifest = prepare(str(tiny))
    path = tiny / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1024] if damage == "cut" else b"\xff" * 8 + data[8:])
    with pytest.raises(LoadError, match=str(path)):
        load(manifest)


def test_shards_load_and_a_missing_one_is_named(tiny: Path, tmp_path: Path) -> None:
    ids = prompt(20, 320, seed=1)
    expected = logits(load(prepare(str(tiny))), ids)
    shards = tmp_path / "shards"
    reference_model(tiny).save_pretrained(shards, max_shard_size="150KB")
    (shards / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    manifest = prepare(str(shards))
    assert len(manifest.weight_files) > 1
    assert torch.equal(logits(load(manifest), ids), expected)
    Path(manifest.weight_files[1]).unlink()
    with pytest.raises(LoadError, match=manifest.weight_files[1]):
        load(manifest)


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    for dtype, expected in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")):
        directory = make_tiny(tmp_path / dtype, dtype=dtype)
        assert load(prepare(str(directory))).facts.dtype == expected


def test_dummy_weights_follow_the_seed(tiny: Path) -> None:
    manifest = prepare(str(tiny))
    ids = prompt(20, 320, seed=1)
    first, again, other = (logits(load(manifest, load_format="dummy", seed=s), ids) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_pool_size(tiny: Path) -> None:
    manifest = prepare(str(tiny))
    per_token = 3 * 2 * 16 * 2 * 4
    by_bytes = load(manifest, num_pages=None, kv_bytes=10 * 16 * per_token + 5)
    assert (by_bytes.facts.num_pages, by_bytes.facts.max_model_len) == (10, 160)
    assert by_bytes.facts.kv_bytes_per_token == per_token
    by_memory = load(manifest, num_pages=None, max_num_seqs=3)
    assert (by_memory.facts.num_pages, by_memory.facts.max_model_len) == (3 * 512 // 16, 512)
    with pytest.raises(DeviceError, match="--kv-cache-memory-bytes 100 holds no page, which needs 12288 bytes"):
        load(manifest, num_pages=None, kv_bytes=100)


# --------------------------------------------------------------------------- GGUF


def write_gguf(directory: Path, path: Path, architecture: str, kind: Any = Type.F32) -> None:
    """The directory's weights as llama.cpp's converter would write them; norms and biases stay float32."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        **{f"self_attn.{x}_proj": f"attn_{y}" for x, y in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
        **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in names:
            target = names[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            part, _, leaf = rest.rpartition(".")
            target = f"blk.{layer}.{parts[part]}.{leaf}"
        values = tensor.float().numpy()
        heads = {"attn_q": 6, "attn_k": 2}.get(target.split(".")[-2]) if architecture == "llama" else None
        if heads:  # half i of each head beside half i + d/2
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        kept = values.ndim == 1 or kind == Type.F32
        writer.add_tensor(target, values if kept else quantize(values, kind), raw_dtype=None if kept else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_manifest(manifest: ModelManifest, path: Path) -> ModelManifest:
    return msgspec.structs.replace(manifest, source=str(path), weight_format="gguf", weight_files=(str(path),))


@pytest.mark.parametrize(("family", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_gguf_holds_the_same_model(tmp_path: Path, family: str, architecture: str) -> None:
    """llama files have permuted q and k rows, qwen files do not."""
    directory = make_tiny(tmp_path / "hf", family)
    write_gguf(directory, tmp_path / "m.gguf", architecture)
    manifest = prepare(str(directory))
    ids = prompt(40, 320, seed=2)
    from_gguf = load(gguf_manifest(manifest, tmp_path / "m.gguf"))
    assert torch.equal(logits(from_gguf, ids), logits(load(manifest), ids))


def test_quantised_gguf_runs_its_dequantised_weights(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "hf", hidden_size=96, intermediate_size=128)
    write_gguf(directory, tmp_path / "m.gguf", "llama", Type.Q8_0)
    manifest = prepare(str(directory))

    def round_off(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = torch.from_numpy(dequantize(quantize(tensor.numpy(), Type.Q8_0), Type.Q8_0))

    ids = prompt(40, 320, seed=2)
    quantised = logits(load(gguf_manifest(manifest, tmp_path / "m.gguf")), ids)
    assert torch.equal(quantised, logits(load(rewrite(directory, round_off)), ids))


@pytest.mark.parametrize(
    "kind",
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_every_quantised_type_is_read(tmp_path: Path, kind: str) -> None:
    """Random bytes are valid blocks of any type, once their scales are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(0)
    if kind in ("F32", "F16"):
        data = rng.standard_normal((6, 512)).astype(np.float32 if kind == "F32" else np.float16)
    else:
        data = rng.integers(0, 56, (6, 512 // elements * size), dtype=np.uint8)  # high bytes under 0x38: |scale| < 0.5
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint((str(path),), 4, 2)
    info = checkpoint.tensors["blk.0.ffn_up.weight"]
    assert info.shape == (6, 512)
    assert info.floating
    expected = dequantize(data, Type[kind]).astype(np.float32)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 10
    assert np.array_equal(checkpoint.read("blk.0.ffn_up.weight").numpy(), expected)


def test_unpermute_by_hand() -> None:
    """Two heads of four rows: halves a b and c d come interleaved as a c b d."""
    rows = np.array([["a0"], ["c0"], ["b0"], ["d0"], ["a1"], ["c1"], ["b1"], ["d1"]])
    assert unpermute(rows, 2).ravel().tolist() == ["a0", "b0", "c0", "d0", "a1", "b1", "c1", "d1"]


def test_a_cut_gguf_is_named(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "hf")
    path = tmp_path / "m.gguf"
    write_gguf(directory, path, "llama")
    manifest = gguf_manifest(prepare(str(directory)), path)
    whole = path.read_bytes()
    for data in (whole[:-1024], whole[:100], b"GGUF" + whole[4:8] + b"\xff" * 8 + whole[16:], b""):
        path.write_bytes(data)
        with pytest.raises(LoadError, match=str(path)):
            load(manifest)


def test_a_gguf_type_that_is_not_read_is_a_mismatch(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 144), np.uint8), raw_dtype=Type.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert not GgufCheckpoint((str(path),), 4, 2).tensors["token_embd.weight"].floating


def test_unknown_family_and_odd_config_are_refused(tiny: Path) -> None:
    manifest = prepare(str(tiny))
    for changes, text in (
        ({"family": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rotary_dim": 8, "qk_norm": True}, "rotate in part"),
        ({"rope": RopeConfig(type="mrope")}, "mrope"),  # type: ignore[arg-type]
    ):
        config: ModelConfig = msgspec.structs.replace(manifest.config, **changes)
        with pytest.raises(LoadError, match=text):
            load(msgspec.structs.replace(manifest, config=config))


def test_edited_config_is_what_counts(tiny: Path) -> None:
    edit_config(tiny, intermediate_size=64)
    with pytest.raises(LoadError, match=r"mlp\.gate_proj\.weight \(is F32 \[112, 96\], wanted a float \[64, 96\]\)"):
        load(prepare(str(tiny)))
