"""GGUF files of Gemma, as llama.cpp's converter writes them: norm weights with their 1, no scale of attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.models import ModelError, prepare, read_config
from proto.model import RopeConfig
from tests import tiny_gguf
from tests.layer_cases import Player, load, prompt
from tests.tiny_models import make_tiny

_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SHAPE = {
    "context_length": 512,
    "embedding_length": 96,
    "block_count": 3,
    "feed_forward_length": 112,
    "attention.head_count": 6,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def weights(directory: Path) -> dict[str, Any]:
    """The directory's tensors under llama.cpp's names."""
    renamed = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        target = _WHOLE.get(name)
        if target is None:
            _, _, layer, rest = name.split(".", 3)
            target = f"blk.{layer}.{_PARTS[rest.removesuffix('.weight')]}.weight"
        renamed[target] = (tensor + 1 if name.endswith("norm.weight") else tensor).numpy()
    return renamed


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (
            "gemma2",
            {"attention.sliding_window": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        (
            "gemma3",
            {
                "attention.sliding_window": 40,
                "attention.sliding_window_pattern": 2,
                "rope.freq_base": 50000.0,
                "rope.freq_base_swa": 100.0,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 4.0,
            },
        ),
    ],
)
def test_a_file_holds_the_same_model(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Config, names and norms: every logit is bitwise that of the Hugging Face directory."""
    directory = make_tiny(tmp_path / "hf", family, tie=True, query_pre_attn_scalar=16)
    path = tiny_gguf.write(
        tmp_path / "m.gguf",
        tiny_gguf.metadata(family, **_SHAPE, **keys),
        weights=weights(directory),
        architecture=family,
    )
    ids = prompt(100, 320, seed=2)
    from_gguf, expected = (
        Player(load(prepare(str(source))), 1, 112).run({0: (ids, 0)}, every_token=True) for source in (path, directory)
    )
    assert torch.equal(from_gguf, expected)


def read(path: Path, architecture: str, **changes: Any) -> Any:
    keys = tiny_gguf.metadata(architecture, attention__key_length=16, attention__value_length=16, **changes)
    return read_config(str(tiny_gguf.write(path / "m.gguf", keys, architecture=architecture)))


def test_what_the_files_leave_out(tmp_path: Path) -> None:
    gemma2 = read(tmp_path, "gemma2", block_count=4)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert gemma2.windows == (4096, 0, 4096, 0)
    assert gemma2.windowed_rope is None
    assert gemma2.attention_scale == 0.25
    gemma3 = read(tmp_path, "gemma3", block_count=7, attention__sliding_window=64, rope__freq_base=1e6)
    assert (gemma3.attention_soft_cap, gemma3.logit_soft_cap) == (0.0, 0.0)
    assert gemma3.windows == (64,) * 5 + (0, 64)
    assert (gemma3.rope, gemma3.windowed_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=10000.0))
    assert read(tmp_path, "gemma3").windows == ()
    assert read(tmp_path, "gemma2", final_logit_softcapping=0.0).logit_soft_cap == 0.0


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_by_hidden_size_per_head(tmp_path: Path, architecture: str, layers: int) -> None:
    config = read(tmp_path, architecture, block_count=layers, attention__head_count=2)
    assert config.attention_scale == pytest.approx((64 / 2) ** -0.5)


def test_windows_layer_by_layer(tmp_path: Path) -> None:
    pattern = [True, True, False, False]
    changes = {"block_count": 4, "attention__sliding_window": 8, "attention__sliding_window_pattern": pattern}
    assert read(tmp_path, "gemma3", **changes).windows == (8, 8, 0, 0)
    with pytest.raises(ModelError, match=r"attention\.sliding_window_pattern must list block_count = 5 layers"):
        read(tmp_path, "gemma3", **(changes | {"block_count": 5}))
