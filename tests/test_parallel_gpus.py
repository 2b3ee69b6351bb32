"""Two ranks of the cuda device, each on a simulated GPU in a process of its own, against one rank on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from engine.models import prepare
from proto.config import WorkerOptions
from proto.ids import Address, StageKind
from scripts.gpu import ranks as kit
from scripts.gpu import speed
from tests import parallel_gpus, parallel_ranks
from tests.cuda_cases import SIZES, script, silent
from tests.flashinfer_cases import DOUBLE, GPU
from tests.flashinfer_double import simulate
from tests.layer_cases import worker_options
from tests.parallel_gpus import Played
from tests.parallel_ranks import Ranks
from tests.tiny_models import make_tiny
from worker.cuda import group
from worker.cuda.gpus import require_cuda
from worker.cuda.group import DeviceGroup, Nccl
from worker.cuda.start import start
from worker.device import DeviceError
from worker.ranks.distributed import add_in_order
from worker.ranks.group import ALONE, Group, PeerLostError
from worker.start import _join_gpus

LAYERS, HIDDEN = 3, 96  # of tiny models


def with_processes(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.timeout(180)(test))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def options_of(directory: Path, **changes: Any) -> WorkerOptions:
    return worker_options(prepare(str(directory)), **(SIZES | {"tensor_parallel_size": 2} | changes))


def play(ranks: Ranks, options: WorkerOptions, stray: bool = False) -> tuple[Played, Played]:
    options = msgspec.structs.replace(options, device="cuda")
    first, second = ranks.run_same(parallel_gpus.play, options, script(options.manifest.config), stray)
    return first, second


# --------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize(
    ("family", "made", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {"num_key_value_heads": 1, "tie": True}, {"deterministic": True}),  # the KV head is copied
        ("qwen2", {}, {"enforce_eager": True}),
        ("qwen3_moe", {}, {}),
        ("gemma2", {}, {}),
        ("mistral", {"window": 9}, {}),
        ("olmo2", {"num_key_value_heads": 1}, {}),  # norms over the heads of all ranks
        ("olmo2", {}, {"deterministic": True}),
        ("phi3", {}, {}),
    ],
    ids=str,
)
@with_processes
def test_tokens_are_those_of_one_rank_and_exchanges_the_same_on_both(
    tmp_path: Path, ranks: Ranks, family: str, made: dict[str, Any], changes: dict[str, Any]
) -> None:
    options = options_of(make_tiny(tmp_path, family, **made), **changes)
    alone = parallel_ranks.play(
        ALONE, msgspec.structs.replace(options, device="reference"), script(options.manifest.config)
    )
    first, second = play(ranks, options)
    assert first.ids == alone
    assert second == first  # also each exchange, with its shape, in start, captures, launches and replays; and pages
    sums = {call[0] for call in first.started + first.done if call[2][-1] == HIDDEN}
    # Under the law no sum is in an order that a library chooses.
    assert sums == ({"gather"} if options.deterministic else {"add", "gather"})


@with_processes
def test_a_decode_step_exchanges_inside_its_two_graphs_only(tmp_path: Path, ranks: Ranks) -> None:
    options = options_of(make_tiny(tmp_path, "llama"))
    first, _ = play(ranks, options)
    decodes = [number for number, plan in enumerate(script(options.manifest.config)) if not plan.chunks]
    assert [first.replays[number] for number in decodes] == [2] * len(decodes)
    assert all(not first.asked[number] for number in decodes)
    step = ["add"] * (1 + 2 * LAYERS) + ["gather", "send from 0"]  # embedding, attention and MLP; logits; ids
    assert [name for name, _, _ in first.done][-2 * len(step) :] == step * 2


@with_processes
def test_a_rank_that_would_draw_or_capture_otherwise_does_as_the_others(tmp_path: Path, ranks: Ranks) -> None:
    options = options_of(make_tiny(tmp_path, "llama"), max_num_batched_tokens=600)
    usual, _ = play(ranks, options)
    first, second = play(ranks, options, stray=True)
    assert first.ids == second.ids == usual.ids
    assert first == second
    assert max(shape[0] for _, _, shape in usual.started) == 600  # connecting, and the graphs of most tokens
    assert len(first.started) < len(usual.started)


@with_processes
def test_the_pool_is_that_of_the_rank_with_least_room(tmp_path: Path, ranks: Ranks) -> None:
    options = options_of(make_tiny(tmp_path, "llama"), device="cuda")
    fewer = msgspec.structs.replace(options, num_pages=17)
    plans = script(options.manifest.config)[:3]
    results = ranks.run(parallel_gpus.play, [(options, plans), (fewer, plans)])
    assert [played.pages for played in results] == [17, 17]
    share = msgspec.structs.replace(options, num_pages=None, gpu_memory_utilization=0.2, enforce_eager=True)
    less = msgspec.structs.replace(share, gpu_memory_utilization=0.18)
    results = ranks.run(parallel_gpus.play, [(share, plans), (less, plans)])
    assert results[0].pages == results[1].pages > 1000
    assert results[0].kv_bytes_per_token == 2 * LAYERS * 2 * 16 * 4  # of the whole model, for the scheduler


@pytest.mark.parametrize("deterministic", [False, True])
@with_processes
def test_what_the_gpu_kit_compares_is_the_same_by_one_rank_and_two(ranks: Ranks, deterministic: bool) -> None:
    with simulate(seed=1):
        alone = kit.logits(DOUBLE, deterministic, ALONE)
    found = ranks.run_same(parallel_gpus.kit_logits, deterministic)
    assert kit.judge(alone, found, DOUBLE.tolerance) > 0
    for wrong in ([found[0], found[1] + 1e-6], [found[0] + 1e-3, found[1] + 1e-3]):
        with pytest.raises(AssertionError, match=r"ranks have different logits|logits of 2 ranks differ"):
            kit.judge(alone, wrong, DOUBLE.tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < kit.RANKS, reason="needs two GPUs")
@pytest.mark.timeout(500)
def test_ranks_on_gpus_have_the_logits_of_one() -> None:
    found = kit.compare(GPU, replace(speed.H200, large=speed.QWEN3_06B, batches=(1, 32)), bandwidth=4e12)
    assert [step["batch"] for step in found["decode"]] == [1, 32]


@with_processes
def test_torch_is_called_as_it_wants_to_be(ranks: Ranks) -> None:
    one = torch.arange(6.0).view(2, 3)
    for summed, gathered, sent in ranks.run_same(parallel_gpus.exchange):
        assert torch.equal(summed, 3 * one)
        assert torch.equal(gathered, torch.stack([one, 2 * one]))
        assert sent.tolist() == [[5, 5], [5, 5]]


# --------------------------------------------------------------------------- one process


class Scripted:
    """`Collectives` whose other rank has 2 where this one has 1."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add(self, x: torch.Tensor) -> None:
        self.calls.append("add")
        x.mul_(3)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("gather")
        return torch.stack([x, 2 * x])

    def send_from_0(self, x: torch.Tensor) -> None:
        self.calls.append("send from 0")
        x.mul_(2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_operations_of_a_group_of_devices(deterministic: bool) -> None:
    collectives = Scripted()
    group = DeviceGroup(Group(1, 2), collectives, deterministic=deterministic)
    x = torch.arange(6.0).view(3, 2).T  # not contiguous
    assert torch.equal(group.sum(x.clone(memory_format=torch.preserve_format)), 3 * x)
    assert torch.equal(group.concatenate(x), torch.cat([x, 2 * x], dim=1))
    assert torch.equal(group.of_rank_0(x.clone()), 2 * x)
    assert collectives.calls == ["gather" if deterministic else "add", "gather", "send from 0"]


def test_only_errors_of_the_exchange_are_those_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, seen in ((dist.DistBackendError("remote process exited"), PeerLostError), (RuntimeError("a bug"), None)):
        monkeypatch.setattr(dist, "all_reduce", mock.Mock(side_effect=error))
        with pytest.raises(seen or RuntimeError, match=str(error)):
            Nccl(2).add(torch.ones(1))


def test_sums_under_the_law_are_rounded_once() -> None:
    """As all ranks' parts are added in float32: 1 + 1/256 + 1/256 is 1 if each sum is rounded to bfloat16."""
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 1 / 256, 1 / 256)]
    assert add_in_order(parts).item() == 1 + 1 / 128
    assert ((parts[0] + parts[1]) + parts[2]).item() == 1


def test_every_worker_needs_a_gpu() -> None:
    with simulate():
        require_cuda(1)
        with pytest.raises(DeviceError, match=r"^2 workers .* need a GPU each, and 1 can be seen"):
            require_cuda(2)


def test_alibi_is_refused_as_kernels_would_take_the_slopes_of_other_heads(tmp_path: Path) -> None:
    options = options_of(make_tiny(tmp_path, "bloom"), device="cuda")
    with simulate(), pytest.raises(DeviceError, match=r"--tensor-parallel-size 2: .* ALiBi on one rank only"):
        start(options, silent, Group(1, 2))


@pytest.mark.parametrize(("size", "gpus"), [(1, [0, 1]), (2, [0, 1, 2, 3])])
def test_each_worker_of_each_replica_takes_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, size: int, gpus: list[int]
) -> None:
    taken: list[tuple[int, int]] = []
    joined: list[tuple[int, Path]] = []
    monkeypatch.setattr(group, "take_gpu", lambda number, workers: taken.append((number, workers)))
    monkeypatch.setattr(
        group, "join_gpus", lambda rank, _size, place, _gpu, deterministic: joined.append((rank, place))
    )
    options = SimpleNamespace(tensor_parallel_size=size, num_workers=2 * size, deterministic=False)
    for replica, rank in product(range(2), range(size)):
        config = SimpleNamespace(run_dir="/run")
        stage: Any = SimpleNamespace(address=Address(StageKind.WORKER, replica, rank), config=config)
        unchecked: Any = options
        _join_gpus(stage, unchecked)
    assert taken == [(number, len(gpus)) for number in gpus]
    met = [(0, "ranks-0"), (1, "ranks-0"), (0, "ranks-1"), (1, "ranks-1")]
    assert joined == ([] if size == 1 else [(rank, Path("/run", name)) for rank, name in met])
