"""The simulated GPU: what goes wrong on a real one at times must go wrong here."""

import inspect

import pytest
import torch

from tests.flashinfer_double import CaptureError, SimulationError, simulate
from tests.flashinfer_double.library import FLASHINFER
from worker.cuda.flashinfer_api import library

SEEDS = range(8)


def often(outcomes: list[bool]) -> bool:
    """A race shows in most orders, though not in all."""
    return sum(outcomes) > len(outcomes) // 2


def test_ordinary_code_computes_what_torch_computes() -> None:
    x, w = torch.randn(5, 6), torch.randn(4, 6)
    for seed in SEEDS:
        with simulate(seed) as gpu:
            there, weight = x.to("cuda"), w.cuda()
            y = torch.nn.functional.linear(there, weight)
            a, b = torch.split(y, [1, 3], dim=1)
            b.mul_(2)
            b[torch.tensor([0, 2]).cuda()] = 1.5
            chosen = torch.cat([y, there[:, :2]], 1).argmax(-1).int()
            expected = x @ w.T
            expected[:, 1:] *= 2
            expected[[0, 2], 1:] = 1.5
            assert torch.allclose(gpu.peek(y), expected)
            assert torch.allclose(a.cpu(), expected[:, :1])
            assert torch.equal(chosen.cpu(), torch.cat([expected, x[:, :2]], 1).argmax(-1).int())
            assert there.device == y.device == torch.device("cuda", 0)


def test_pinned_memory_is_read_late() -> None:
    outcomes = []
    for seed in SEEDS:
        with simulate(seed) as gpu:
            host = torch.ones(4, pin_memory=True)
            there = torch.empty(4, device="cuda")
            there.copy_(host, non_blocking=True)
            host.fill_(2)
            outcomes.append(bool((gpu.peek(there) == 2).all()))
    assert often(outcomes)


def test_pageable_memory_is_read_at_once() -> None:
    for seed in SEEDS:
        with simulate(seed) as gpu:
            host = torch.ones(4)
            there = host.to("cuda", non_blocking=True)
            host.fill_(2)
            assert (gpu.peek(there) == 1).all()


def test_a_result_is_not_there_before_its_event() -> None:
    early = []
    for seed in SEEDS:
        with simulate(seed):
            host = torch.zeros(4, pin_memory=True)
            host.copy_(torch.arange(4.0, device="cuda") + 1, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            early.append(bool((host == 0).all()))
            event.synchronize()
            assert torch.equal(host, torch.arange(4.0) + 1)
    assert often(early)


@pytest.mark.parametrize("waits", [False, True])
def test_streams_wait_for_each_other_or_race(waits: bool) -> None:
    right = []
    for seed in range(16):
        with simulate(seed) as gpu:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            x = torch.zeros(3, device="cuda")
            for _ in range(20):
                x.add_(1)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 1
            right.append(bool((gpu.peek(y) == 20).all()))
    assert all(right) if waits else not all(right)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_on_one_stream_is_not_safe_on_another(recorded: bool) -> None:
    right = []
    for seed in range(16):
        with simulate(seed) as gpu:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            x = torch.ones(3, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total = torch.zeros(3, device="cuda")
                for _ in range(20):
                    total.add_(1)
                total.add_(x)
            if recorded:
                x.record_stream(side)
            del x
            right.append(bool((gpu.peek(total) == 21).all()))
    assert all(right) if recorded else not all(right)


def test_fresh_memory_is_not_zero() -> None:
    with simulate() as gpu:
        assert gpu.peek(torch.empty(3, device="cuda")).isnan().all()
        assert (gpu.peek(torch.empty(3, dtype=torch.int32, device="cuda")) > 1 << 30).all()


def test_host_and_device_do_not_mix() -> None:
    with simulate():
        x = torch.ones(3, device="cuda")
        with pytest.raises(SimulationError, match="all tensors on cuda:0"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError):
            x.numpy()
        assert (x + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]  # a scalar may be on the host


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(3)),
    ],
)
def test_hidden_waits_are_refused_where_torch_refuses_them(wait) -> None:  # type: ignore[no-untyped-def]
    with simulate() as gpu:
        x = torch.ones(3, device="cuda")
        wait(x)  # allowed
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait(x)
        torch.cuda.set_sync_debug_mode("default")
        with gpu.timeline.launch_path(), pytest.raises(SimulationError, match="on the launch path"):
            wait(x)
        with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait(x)


def test_the_launch_path_may_wait_for_events_only() -> None:
    with simulate() as gpu, gpu.timeline.launch_path() as account:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        assert account.waits == ["Event.synchronize"]
        with pytest.raises(SimulationError):
            torch.cuda.synchronize()
        with pytest.raises(SimulationError, match="pageable"):
            torch.ones(3).to("cuda", non_blocking=True)


def test_a_graph_computes_on_the_memory_of_its_capture() -> None:
    for seed in SEEDS:
        with simulate(seed) as gpu:
            x = torch.ones(3, device="cuda")
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graph, stream=stream):
                y = x * 2 + 1
            assert gpu.peek(y).isnan().all()  # a capture computes nothing
            with torch.cuda.stream(stream):
                for value in (1.0, 5.0):
                    x.fill_(value)
                    graph.replay()
                    assert (gpu.peek(y) == 2 * value + 1).all()
            assert graph.reads(x)  # type: ignore[attr-defined]
            assert len(gpu.timeline.account.replays) == 2
            del x
            with pytest.raises(SimulationError, match="died after the capture"):
                graph.replay()


def test_graphs_of_a_pool_overwrite_what_others_freed() -> None:
    with simulate() as gpu:
        x = torch.ones(3, device="cuda")
        pool = torch.cuda.graph_pool_handle()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            kept = x + 1
            dropped = x + 2
            address = dropped.raw  # type: ignore[attr-defined]
            del dropped
        with torch.cuda.graph(second, pool=pool):
            also_kept = x + 3
        first.replay()
        assert (gpu.peek(kept) == 2).all()
        second.replay()
        assert (gpu.peek(also_kept) == 4).all()
        assert (gpu.peek(kept) == 2).all()
        assert address.isnan().all()


def test_a_failed_capture_cannot_be_replayed() -> None:
    with simulate():
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError), torch.cuda.graph(graph):
            x.sum().item()
        with pytest.raises(SimulationError, match="was not captured"):
            graph.replay()
        assert torch.cuda.is_current_stream_capturing() is False


def test_waiting_for_what_never_comes_is_named() -> None:
    with simulate():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.marker.done = False  # type: ignore[attr-defined]
        torch.cuda.current_stream().items.clear()  # type: ignore[attr-defined]
        stream.wait_event(event)
        with pytest.raises(SimulationError, match="deadlock"):
            stream.synchronize()


def test_memory_is_counted() -> None:
    with simulate():
        free, total = torch.cuda.mem_get_info()
        x = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info() == (free - (1 << 20), total)
        del x
        assert torch.cuda.mem_get_info() == (free, total)
        assert torch.cuda.max_memory_allocated() == 1 << 20
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.Stream
    with simulate():
        assert torch.cuda.is_available()
        assert library().flashinfer.__version__
    assert torch.cuda.Stream is before
    assert torch.zeros(2).device.type == "cpu"


def test_the_double_has_the_signatures_of_flashinfer() -> None:
    """Where FlashInfer can be imported (it needs no GPU for that): every parameter, by name, place and default."""
    real = pytest.importorskip("flashinfer")
    names = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul")
    pairs = [(getattr(FLASHINFER, name), getattr(real, name)) for name in names]
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        ours, theirs = getattr(FLASHINFER, name), getattr(real, name)
        pairs += [(getattr(ours, method), getattr(theirs, method)) for method in ("__init__", "plan", "run")]
        if hasattr(theirs, "_plan_impl"):  # its plan hands keywords on
            pairs[-2] = (ours.plan, theirs._plan_impl)
    for ours, theirs in pairs:
        expected = inspect.signature(theirs).parameters
        parameters = inspect.signature(ours).parameters
        positional = [p.name for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert list(expected)[: len(positional)] == positional, ours.__qualname__
        for name, parameter in parameters.items():
            assert name in expected, f"{ours.__qualname__}: {name}"
            if name in ("causal", "window_left", "backend", "non_blocking", "use_tensor_cores", "eps"):
                assert parameter.default == expected[name].default, f"{ours.__qualname__}: default of {name}"
