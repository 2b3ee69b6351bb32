"""Every family and RoPE type against transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import prepare
from tests.layer_cases import Player, load, prompt
from tests.marks import mark_rest
from tests.tiny_models import FAMILIES, ROPES, make_tiny, reference_model
from worker.steps.batch import I32Array

TOLERANCE = 1e-4

CASES = [
    *({"family": family} for family in FAMILIES),
    *({"family": "llama", "rope": rope} for rope in ROPES),
    {"family": "qwen3", "rope": "yarn"},
    {"family": "mistral", "window": 40},
    {"family": "qwen2", "window": 33},
    {"family": "llama", "tie": True, "attention_bias": True, "mlp_bias": True},
    {"family": "llama", "num_key_value_heads": 6, "head_dim": 24},
    {"family": "llama", "num_key_value_heads": 1, "head_dim": 80, "intermediate_size": 100},
]


@torch.no_grad()
def reference_logits(directory: Path, ids: I32Array, at_once: bool = True) -> torch.Tensor:
    """[len(ids), vocab] of transformers, fed at once or one token at a time."""
    model = reference_model(directory)
    tokens = torch.from_numpy(ids).long()[None]
    if at_once:
        at_end: torch.Tensor = model(tokens).logits[0]
        return at_end
    cache, logits = None, []
    for i in range(len(ids)):
        out = model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize(
    "case", mark_rest(pytest.mark.slow, CASES, keep=5), ids=lambda case: " ".join(str(v) for v in case.values())
)
def test_logits_equal_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    """Whole prompts in one step, chunks beside other rows, then decode steps, on cpu and reference."""
    directory = make_tiny(tmp_path, **case)
    prompts = [prompt(n, 320, seed=n) for n in (150, 67, 9)]
    expected = [reference_logits(directory, ids) for ids in prompts]
    for device in ("cpu", "reference"):
        player = Player(load(prepare(str(directory)), device=device), 3, 160)
        whole = player.run({i: (ids, 0) for i, ids in enumerate(prompts)}, every_token=True)
        torch.testing.assert_close(whole, torch.cat(expected), atol=TOLERANCE, rtol=0)
    forward = load(prepare(str(directory)))
    player = Player(forward, 3, 160, seed=1)
    player.run({0: (prompts[0][:70], 0), 2: (prompts[2][:8], 0)})
    mixed = player.run({2: (prompts[2][8:], 8), 0: (prompts[0][70:], 70), 1: (prompts[1], 0)})
    torch.testing.assert_close(
        mixed, torch.stack([expected[2][-1], expected[0][-1], expected[1][-1]]), atol=TOLERANCE, rtol=0
    )


def test_dynamic_ntk_beyond_its_context(tmp_path: Path) -> None:
    """A position rotates by itself alone, which is what transformers does token by token."""
    directory = make_tiny(tmp_path, rope="dynamic", max_position_embeddings=32)
    ids = prompt(60, 320, seed=3)
    player = Player(load(prepare(str(directory)), max_model_len=64), 1, 64)
    expected = reference_logits(directory, ids, at_once=False)
    torch.testing.assert_close(player.chunked(0, ids, 60), expected, atol=TOLERANCE, rtol=0)
    at_once = reference_logits(directory, ids[:32])
    torch.testing.assert_close(player.chunked(0, ids[:32], 7), at_once, atol=TOLERANCE, rtol=0)
