"""Gemma 2 and 3, Mixtral, Qwen3-MoE and BLOOM: logits of transformers, and the law, on tiny random models."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.models import prepare
from tests.layer_cases import Player, load, prompt
from tests.marks import mark_rest
from tests.test_law_forward import assert_law
from tests.test_layers_models import TOLERANCE, reference_logits
from tests.tiny_models import NEWER_FAMILIES, make_tiny

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}
CASES: list[dict[str, Any]] = [
    *({"family": family} for family in NEWER_FAMILIES),
    {"family": "gemma2", "tie": True, "num_key_value_heads": 1, "head_dim": 40, "attention_bias": True},
    {"family": "gemma3", "tie": True, "final_logit_softcapping": 4.0, "layer_types": ["full_attention"] * 3},
    {"family": "mixtral", "sliding_window": 33, "num_experts_per_tok": 5},
    {"family": "qwen3_moe", "norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True},
    {"family": "qwen3_moe", "mlp_only_layers": [0, 2], "use_sliding_window": True, "sliding_window": 20},
    {"family": "bloom", "tie": True, "n_head": 8},
    {"family": "granite", "tie": True, "attention_bias": True, "mlp_bias": True},
    {"family": "olmo2", "tie": True, "num_key_value_heads": 6, "attention_bias": True},
    {"family": "phi3", "tie": True, "sliding_window": None, "rope_parameters": LONGROPE},
]


@pytest.mark.parametrize(
    "case",
    mark_rest(pytest.mark.slow, CASES, keep=len(NEWER_FAMILIES)),
    ids=lambda case: " ".join(str(v) for v in case.values()),
)
def test_logits_equal_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    """Whole prompts in one step on both devices; then chunks beside other rows, and decode."""
    directory = make_tiny(tmp_path, **case)
    prompts = [prompt(n, 320, seed=n) for n in (100, 51, 9)]
    expected = [reference_logits(directory, ids) for ids in prompts]
    manifest = prepare(str(directory))
    for device in ("cpu", "reference"):
        player = Player(load(manifest, device=device), 3, 112)
        whole = player.run({i: (ids, 0) for i, ids in enumerate(prompts)}, every_token=True)
        torch.testing.assert_close(whole, torch.cat(expected), atol=TOLERANCE, rtol=0)
    player = Player(load(manifest), 3, 112, seed=1)
    player.run({0: (prompts[0][:70], 0), 2: (prompts[2][:8], 0)})
    mixed = player.run({2: (prompts[2][8:], 8), 0: (prompts[0][70:], 70), 1: (prompts[1], 0)})
    torch.testing.assert_close(
        mixed, torch.stack([expected[2][-1], expected[0][-1], expected[1][-1]]), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attention_soft_cap": 0.0}),
        ("gemma2", {"logit_soft_cap": 0.0}),
        ("gemma2", {"attention_scale": 0.0}),
        ("gemma2", {"windows": (41, 0, 41)}),
        ("gemma3", {"windowed_rope": None}),
        ("gemma3", {"windows": (40, 40, 0)}),
        ("mixtral", {"renormalise_experts": False}),
        ("qwen3_moe", {"experts_per_token": 2}),
        ("bloom", {"alibi": False}),
        ("granite", {"attention_scale": 0.0}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"logit_divisor": 1.0}),
        ("phi3", {"rotary_dim": 0}),
        ("phi3", {"windows": (41, 40, 40)}),
    ],
    ids=str,
)
def test_the_tiny_models_show_each_peculiarity(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Left out, it moves logits by far more than the tolerance: the comparison above would find it missing."""
    manifest = prepare(str(make_tiny(tmp_path, family)))
    without = msgspec.structs.replace(manifest, config=msgspec.structs.replace(manifest.config, **changes))
    ids = prompt(60, 320, seed=4)
    logits = [Player(load(m), 1, 64).run({0: (ids, 0)}, every_token=True) for m in (manifest, without)]
    assert (logits[0] - logits[1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(("served", "length"), [(64, 64), (None, 150)])
def test_longrope_on_each_side_of_the_trained_length(served: int | None, length: int, tmp_path: Path) -> None:
    """The served length chooses the factors, whatever a call's length: chunks and decode steps agree with the whole.

    transformers chooses by the call: a prompt within the trained 64 positions, and one beyond them.
    """
    directory = make_tiny(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    ids = prompt(length, 320, seed=5)
    expected = reference_logits(directory, ids)
    manifest = prepare(str(directory))
    for device in ("cpu", "reference"):
        player = Player(load(manifest, device=device, max_model_len=served), 1, 160)
        for chunk in (length, 20):
            torch.testing.assert_close(player.chunked(0, ids, chunk), expected, atol=TOLERANCE, rtol=0)
        decoded = player.chunked(0, ids[-3:], 1, start=length - 3)
        torch.testing.assert_close(decoded, expected[-3:], atol=TOLERANCE, rtol=0)
    short, long = (Player(load(manifest, max_model_len=n), 1, 64).chunked(0, ids[:60], 60) for n in (64, 65))
    assert (short - long).abs().max() > 100 * TOLERANCE


def test_few_pages_leave_longrope_as_it_is(tmp_path: Path) -> None:
    """What memory there happens to be must not choose the factors."""
    directory = make_tiny(tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    manifest, ids = prepare(str(directory)), prompt(30, 320, seed=5)
    few, many = load(manifest, num_pages=3), load(manifest)
    assert few.facts.max_model_len < 64 < many.facts.max_model_len
    assert torch.equal(Player(few, 1, 32).run({0: (ids, 0)}), Player(many, 1, 32).run({0: (ids, 0)}))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_law(family: str, dtype: str, tmp_path: Path) -> None:
    forward = load(prepare(str(make_tiny(tmp_path, family))), dtype=dtype)
    assert_law(forward, [140, 75, 22, 70, 9], [130, 63, 3, 64, 1])


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "bloom"])
def test_law_on_the_reference_device(family: str, tmp_path: Path) -> None:
    forward = load(prepare(str(make_tiny(tmp_path, family))), device="reference", dtype="bfloat16")
    assert_law(forward, [50, 22, 9], [45, 20, 3])


@pytest.mark.parametrize("family", ["mixtral", "bloom"])
def test_a_neighbour_with_nan_stays_alone(family: str, tmp_path: Path) -> None:
    """Also where both choose the same experts."""
    forward = load(prepare(str(make_tiny(tmp_path, family))))
    ids = prompt(30, 320, seed=1)
    clean = np.where(ids == 7, 8, ids)
    player = Player(forward, 2, 64)
    expected = player.run({0: (clean, 0)})
    forward.model.embedding.weight.tensor[7] = float("nan")  # type: ignore[attr-defined]
    beside = player.run({1: (np.full(40, 7, np.int32), 0), 0: (clean, 0)})
    assert torch.isnan(beside[0]).all()
    assert torch.equal(beside[1:], expected)
