"""Row-wise arithmetic of the newer families: kernels against exact values, and rows against their neighbours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from proto.model import ModelConfig
from worker.cpu.gemm import GemmRule
from worker.cpu.ops import CpuOps
from worker.cpu.reference_ops import ReferenceOps
from worker.layers.attention import alibi_slopes
from worker.layers.ops import Ops
from worker.models.moe import Mixtral

CPU, REFERENCE = CpuOps(GemmRule(False, 1, {}), 1), ReferenceOps()
SIZE = 102  # no multiple of the kernels' 16 lanes
WEIGHT, BIAS = torch.linspace(-1, 2, SIZE), torch.linspace(3, -1, SIZE)

OPERATIONS: dict[str, tuple[Callable[[Ops, torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": (lambda ops, x: ops.gelu(x), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "gelu_mul": (
        lambda ops, x: ops.gelu_mul(x),
        lambda x: torch.nn.functional.gelu(x[:, : SIZE // 2], approximate="tanh") * x[:, SIZE // 2 :],
    ),
    "layer_norm": (
        lambda ops, x: ops.layer_norm(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype), 1e-5),
        lambda x: torch.nn.functional.layer_norm(x, (SIZE,), WEIGHT.to(x.dtype), BIAS.to(x.dtype), 1e-5),
    ),
    "soft_cap": (lambda ops, x: ops.soft_cap(x, 3.0), lambda x: 3.0 * torch.tanh(x / 3.0)),
}


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Values from 1e-6 to 100 of both signs."""
    generator = torch.Generator().manual_seed(0)
    magnitude = 10 ** (torch.rand(37, SIZE, generator=generator) * 8 - 6)
    return (magnitude * torch.randn(37, SIZE, generator=generator).sign()).to(dtype)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_float32_is_within_a_few_roundings(ops: Ops, name: str) -> None:
    ours, exact = OPERATIONS[name]
    x = rows(torch.float32)
    expected = exact(x.double() if name != "layer_norm" else x)
    # torch's gelu loses what 1 + tanh cancels, times up to 100
    torch.testing.assert_close(ours(ops, x).double(), expected.double(), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16_is_the_rounded_float32(name: str) -> None:
    ours, _ = OPERATIONS[name]
    x = rows(torch.bfloat16)
    if name == "layer_norm":
        exact = CPU.layer_norm(x.float(), WEIGHT.bfloat16().float(), BIAS.bfloat16().float(), 1e-5)
    else:
        exact = ours(CPU, x.float())
    assert torch.equal(ours(CPU, x), exact.bfloat16())


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_do_not_notice_each_other(name: str) -> None:
    ours, _ = OPERATIONS[name]
    x = rows(torch.float32)
    alone = torch.cat([ours(CPU, x[i : i + 1].clone()) for i in range(len(x))])
    assert torch.equal(ours(CPU, x), alone)


def test_tanh_is_exact_to_the_last_bits() -> None:
    """Relative to tanh itself, also where it is small, and across the seam of the two formulas."""
    x = torch.cat([torch.linspace(-10, 10, 200_001), 10 ** torch.linspace(-30, 0, 1000)])[None]
    exact = torch.tanh(x.double())
    got = CPU.soft_cap(x, 1.0).double()
    nonzero = exact != 0
    assert ((got - exact)[nonzero] / exact[nonzero]).abs().max() < 4e-7
    assert CPU.soft_cap(torch.tensor([[np.inf, -np.inf, 0.0]]), 1.0).tolist() == [[1.0, -1.0, 0.0]]
    assert CPU.soft_cap(torch.tensor([[np.nan]]), 1.0).isnan().all()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_routing(count: int, renormalise: bool) -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)) * 3
    logits[0] = 0.0  # a tie of all
    logits[1, 2] = logits[1, 6] = 20.0
    logits[2, 5] = 1000.0  # the others' probabilities are 0 in float32
    logits[3, 4] = np.nan
    probabilities = logits.softmax(-1)
    rows = [row for row in range(len(logits)) if row != 3]
    chosen = torch.tensor([sorted(range(8), key=lambda e: (-logits[row, e].item(), e))[:count] for row in rows])
    expected = probabilities[rows].gather(1, chosen)
    if renormalise:
        expected /= expected.sum(1, keepdim=True)
    for ops in (CPU, REFERENCE):
        got = ops.route(logits, count, renormalise)
        assert got.experts[rows].tolist() == chosen.tolist()
        torch.testing.assert_close(got.weights[rows], expected, rtol=1e-6, atol=1e-7)
        assert got.weights[3].isnan().all()
        assert sorted(set(got.experts[3].tolist())) == sorted(got.experts[3].tolist())
        assert 0 <= int(got.experts.min()) <= int(got.experts.max()) < 8


def test_slopes_by_hand() -> None:
    """The paper's for 8 heads; those of 6 heads as BLOOM's authors interleave them."""
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(1).tolist() == [2.0**-8]


class StrictOps(ReferenceOps):
    """Products want rows in fours, and say so."""

    row_multiple = 4

    def linear(self, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % self.row_multiple == 0, f"{x.shape[0]} rows"
        return super().linear(x, packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_is_the_weighted_sum_of_its_experts(dtype: torch.dtype) -> None:
    """Against experts computed one by one for each token; whoever else is in the step changes no bit."""
    config = ModelConfig(
        family="mixtral",
        vocab_size=8,
        hidden_size=12,
        intermediate_size=10,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=12,
        norm_eps=1e-6,
        max_position_embeddings=8,
        num_experts=5,
        experts_per_token=2,
        expert_size=10,
        renormalise_experts=True,
    )
    mixture: Any = Mixtral(config, StrictOps(), dtype=dtype, max_position=8).layers[0].mlp  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(4)
    weights = {}
    for path, parameter in mixture.parameters().items():
        parameter.tensor.normal_(0, 0.5, generator=generator)
        weights[path] = parameter.tensor.float()
    mixture.pack()
    x = torch.randn(24, 12, generator=generator).to(dtype)
    got = mixture(x)
    for token in range(len(x)):
        row = x[token].float()
        probabilities = (weights["router.weight"] @ row).softmax(0)
        chosen = probabilities.topk(2)
        expected = torch.zeros(12)
        for weight, expert in zip(chosen.values / chosen.values.sum(), chosen.indices.tolist(), strict=True):
            gate, up = weights[f"experts.{expert}.gate_up.weight"].chunk(2)
            down = weights[f"experts.{expert}.down.weight"]
            expected += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got[token].float(), expected, rtol=tolerance, atol=tolerance)
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(mixture(x[order]), got[order])
    assert torch.equal(mixture(x[4:8]), got[4:8])
