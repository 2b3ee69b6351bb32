"""Mixtures of experts on the emulated GPU: grouped products against experts computed one after another."""

from typing import Any

import pytest
import torch

from tests.flashinfer_double import Gpu, MetadataError, simulate
from worker.cpu.reference_ops import ReferenceOps
from worker.cuda.ops import CudaOps
from worker.layers.experts import Mixture
from worker.layers.module import Target
from worker.layers.ops import Ops, Routes
from worker.ranks.group import ALONE, Group

HIDDEN, INNER, EXPERTS, COUNT = 24, 16, 6, 2


def make(ops: Ops, group: Group = ALONE, renormalise: bool = True, dtype: torch.dtype = torch.float32) -> Mixture:
    """The same weights each time, of which a rank of `group` takes its part; expert 4 is nearly never chosen."""
    generator = torch.Generator().manual_seed(5)
    target = Target(ops, group, dtype)
    mixture = Mixture(target, HIDDEN, INNER, EXPERTS, count=COUNT, renormalise=renormalise)
    for parameter in mixture.parameters().values():
        parameter.copy_from((torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter.tensor.device))
    mixture.pack()
    return mixture


def on_device(**settings: Any) -> tuple[CudaOps, Mixture]:
    ops = CudaOps(deterministic=settings.pop("deterministic", False))
    with torch.device("cuda"):
        return ops, make(ops, **settings)


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_grouped_experts_give_what_single_ones_give(count: int, renormalise: bool, deterministic: bool) -> None:
    x = tokens(count)
    expected = make(ReferenceOps(), renormalise=renormalise)(x)
    with simulate(1) as gpu:
        _, mixture = on_device(renormalise=renormalise, deterministic=deterministic)
        with gpu.timeline.launch_path() as account:
            got = mixture(x.pin_memory().to("cuda", non_blocking=True))
        assert account.waits == []
        torch.testing.assert_close(gpu.peek(got), expected, rtol=1e-4, atol=1e-5)


def test_all_tokens_of_one_expert_and_none_of_others() -> None:
    x = tokens(40)[:1].expand(40, -1).contiguous()
    expected = make(ReferenceOps())(x)
    with simulate(2) as gpu:
        _, mixture = on_device()
        torch.testing.assert_close(gpu.peek(mixture(x.to("cuda"))), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_and_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    """Whatever padding rows hold: numbers, or what was never written."""
    x = tokens(21).to(dtype)
    with simulate(3) as gpu:
        _, mixture = on_device(dtype=dtype)
        alone = gpu.peek(mixture(x.to("cuda")))
        for padding in (0.0, 1e4, float("nan")):
            padded = torch.cat([x, torch.full((11, HIDDEN), padding, dtype=dtype)])
            assert torch.equal(gpu.peek(mixture(padded.to("cuda")))[:21], alone)
        order = torch.randperm(21, generator=torch.Generator().manual_seed(0))
        assert torch.equal(gpu.peek(mixture(x[order].to("cuda"))), alone[order])


def test_under_the_law_tiles_have_one_height(monkeypatch: pytest.MonkeyPatch) -> None:
    for deterministic, heights in ((True, {64}), (False, {16, 64})):
        with simulate(3):
            ops, mixture = on_device(deterministic=deterministic)
            seen: set[int] = set()
            product = ops._kernels.grouped_product

            def spy(*args: Any, product: Any = product, seen: set[int] = seen) -> torch.Tensor:
                seen.add(args[-1])
                result: torch.Tensor = product(*args)
                return result

            monkeypatch.setattr(ops._kernels, "grouped_product", spy)
            for count in (1, 30, 60):
                mixture(tokens(count).to("cuda"))
            monkeypatch.undo()
            assert seen == heights


def test_a_graph_holds_a_mixture(gpu: Gpu) -> None:
    _, mixture = on_device()
    x = torch.zeros(8, HIDDEN, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        mixture(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = mixture(x)
        graph.capture_end()
        for seed in (8, 9):
            new = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(seed))
            x.copy_(new)
            graph.replay()
            torch.testing.assert_close(gpu.peek(out), make(ReferenceOps())(new), rtol=1e-4, atol=1e-5)


def test_ranks_add_up_to_the_whole(gpu: Gpu) -> None:
    x = tokens(9)
    parts = [gpu.peek(on_device(group=Group(rank, 2))[1](x.to("cuda"))) for rank in range(2)]
    torch.testing.assert_close(sum(parts), make(ReferenceOps())(x), rtol=1e-4, atol=1e-5)


def test_products_read_the_weights_where_they_were_loaded(gpu: Gpu) -> None:
    with torch.device("cuda"):
        gate_up, down = torch.zeros(EXPERTS, 2 * INNER, HIDDEN), torch.zeros(EXPERTS, HIDDEN, INNER)
    used = gpu.used
    experts = CudaOps().experts(gate_up, down)
    assert gpu.used - used <= 4 * EXPERTS
    del gate_up, down
    routes = Routes(torch.zeros(2, 2, dtype=torch.int32, device="cuda"), torch.ones(2, 2, device="cuda"))
    assert gpu.peek(experts(torch.zeros(2, HIDDEN, device="cuda"), routes)).tolist() == [[0.0] * HIDDEN] * 2


@pytest.mark.parametrize("mistake", ["ends", "order"])
def test_the_double_sees_a_wrong_arrangement(mistake: str, gpu: Gpu) -> None:
    x, weight = torch.zeros(4, HIDDEN, device="cuda"), torch.zeros(2, 8, HIDDEN, device="cuda")
    ends = torch.full((2,), 3 if mistake == "ends" else 4, dtype=torch.int32, device="cuda")
    order = torch.arange(4, device="cuda")
    if mistake == "order":
        order.zero_()
    with pytest.raises(MetadataError):
        gpu.peek(CudaOps()._kernels.grouped_product(x, weight, ends, order, 1, 16))


@pytest.fixture
def gpu() -> Any:
    with simulate(4) as simulated:
        yield simulated
