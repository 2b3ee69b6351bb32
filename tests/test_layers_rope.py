"""Tables of cos and sin against transformers, far out."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from proto.model import RopeConfig
from worker.layers.rope import Rope, pair_across_halves, tables

POSITIONS = [0, 1, 1000, 8000, 20000]
HEAD_DIM = 64

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("kind", "theta", "extra"),
    [
        ("default", 10000.0, {}),
        ("default", 500000.0, {}),
        ("linear", 10000.0, {"factor": 4.0}),
        ("llama3", 500000.0, LLAMA3),
        ("yarn", 10000.0, YARN),
        ("yarn", 1000000.0, YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        ("yarn", 10000.0, YARN | {"attention_factor": 1.3}),
        ("yarn", 10000.0, YARN | {"mscale": 0.8, "mscale_all_dim": 1.1}),
    ],
)
def test_tables_equal_transformers(kind: Any, theta: float, extra: dict[str, Any]) -> None:
    expected_cos, expected_sin = _transformers(kind, theta, extra, 32768, POSITIONS)
    ours = {name.replace("_embeddings", ""): value for name, value in extra.items()}
    cos, sin = tables(RopeConfig(type=kind, theta=theta, **ours), HEAD_DIM, POSITIONS[-1] + 1)
    # An angle near 20 000 has a spacing of 2e-3 in float32; both sides round it alike, or one step apart.
    torch.testing.assert_close(cos[POSITIONS], expected_cos, atol=3e-3, rtol=0)
    torch.testing.assert_close(sin[POSITIONS], expected_sin, atol=3e-3, rtol=0)
    close = (cos[POSITIONS] - expected_cos).abs() < 1e-6
    assert close.float().mean() > 0.95


@pytest.mark.parametrize("position", POSITIONS)
def test_dynamic_equals_transformers_at_the_newest_position(position: int) -> None:
    """transformers rotates all tokens of a call for the call's length; its last token is the one to compare."""
    expected_cos, expected_sin = _transformers("dynamic", 10000.0, {"factor": 4.0}, 4096, [position])
    config = RopeConfig(type="dynamic", factor=4.0, original_max_position=4096)
    cos, sin = tables(config, HEAD_DIM, position + 1)
    torch.testing.assert_close(cos[[position]], expected_cos, atol=3e-3, rtol=0)
    torch.testing.assert_close(sin[[position]], expected_sin, atol=3e-3, rtol=0)


def test_tables_do_not_depend_on_their_length() -> None:
    for kind in ("default", "dynamic", "llama3", "yarn"):
        config = RopeConfig(type=kind, factor=4.0, original_max_position=64)
        short, long = tables(config, 24, 77)[0], tables(config, 24, 1001)[0]
        assert torch.equal(short, long[:77])


FACTORS = {"short_factor": [1.0 + i / 50 for i in range(32)], "long_factor": [1.0 + i / 3 for i in range(32)]}


@pytest.mark.parametrize("extra", [{}, {"factor": 16.0}, {"factor": 1.0}, {"attention_factor": 1.3}], ids=str)
@pytest.mark.parametrize("longest", [4096, 4097])
def test_longrope_equals_transformers_on_the_served_side_of_the_trained_length(
    longest: int, extra: dict[str, float]
) -> None:
    """transformers looks at the longest position of a call, ours at the longest sequence that is served."""
    positions = [0, 1, 1000, longest - 1]
    expected_cos, expected_sin = _transformers(
        "longrope", 10000.0, {**FACTORS, **extra, "original_max_position_embeddings": 4096}, 32768, positions
    )
    config = RopeConfig(
        type="longrope",
        factor=extra.get("factor", 8.0),
        original_max_position=4096,
        attention_factor=extra.get("attention_factor"),
        short_factors=tuple(FACTORS["short_factor"]),
        long_factors=tuple(FACTORS["long_factor"]),
    )
    cos, sin = tables(config, HEAD_DIM, longest)
    torch.testing.assert_close(cos[positions], expected_cos, atol=3e-3, rtol=0)
    torch.testing.assert_close(sin[positions], expected_sin, atol=3e-3, rtol=0)
    assert ((cos[positions] - expected_cos).abs() < 1e-6).float().mean() > 0.95


def test_a_head_of_which_a_part_rotates() -> None:
    """Kernels rotate dimension i with i + d/2: in the new order, the pairs of the rotating part stand there."""
    heads = torch.arange(10).expand(3, 10)
    assert pair_across_halves(heads, 4)[1].tolist() == [0, 1, 4, 5, 6, 2, 3, 7, 8, 9]
    rope = Rope(RopeConfig(), 10, 50, rotary_dim=4)
    cos, sin = tables(RopeConfig(), 4, 50)
    assert torch.equal(rope.cos, torch.cat([cos, torch.ones(50, 3)], dim=1))
    assert torch.equal(rope.sin, torch.cat([sin, torch.zeros(50, 3)], dim=1))


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="mrope"):
        tables(RopeConfig(type="mrope"), 64, 10)  # type: ignore[arg-type]


def _transformers(
    kind: str, theta: float, extra: dict[str, Any], max_position: int, positions: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 4,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **extra},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]
