"""CUDA graphs on the emulated GPU: which there are, and what their replays read and write."""

import itertools

import msgspec
import pytest
import torch

from scripts.gpu.speed import LLAMA_8B, QWEN3_06B
from tests.builders import i32, make_plan, make_row
from tests.cuda_cases import (
    MODEL,
    ROWS,
    attention_of,
    both_groups,
    changed_slots,
    ids_of,
    make_device,
    options_of,
    plans,
    play,
)
from tests.flashinfer_double import Gpu, SimulationError
from worker.cuda.graphs import bucket_sizes
from worker.cuda.piecewise import SIZES, _Lives, busy_tokens, token_sizes
from worker.cuda.sampling import Mode
from worker.cuda.start import start
from worker.device import Deferred


@pytest.mark.parametrize("most", [1, 2, 3, 6, 8, 9, 60, 64, 100, 256, 257, 512, 1000])
def test_buckets(most: int) -> None:
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert {1, 2, 4, 8} & set(range(most)) <= set(sizes)
    assert all(after <= 2 * size for size, after in itertools.pairwise(sizes))


@pytest.mark.emulation
def test_no_bucket_is_missed_and_buffers_keep_their_addresses(gpu: Gpu) -> None:
    device = make_device()
    step, graphs = device._step, device._graphs
    assert graphs is not None
    state = step.state
    read_by_forward = {
        "inputs": step.inputs,
        "logits": step.logits,
        "finite": step.finite,
        "tokens": state.last_tokens,
    }
    for group, pages in attention_of(device).groups.items():
        read_by_forward |= {
            f"pages {group}": state.groups[group].pages,
            f"keys {group}": pages.keys,
            f"values {group}": pages.values,
            f"slots {group}": pages.kv_slots,
            f"indices {group}": pages.kv_indices,
        }
    read_by_sampling = {
        "inputs": step.inputs,
        "logits": step.logits,
        "finite": step.finite,
        "drawn": step.drawn,
        "tokens": state.last_tokens,
    }
    fixed = read_by_forward | read_by_sampling | {"sampling": state.sampling.words}
    addresses = {name: tensor.data_ptr() for name, tensor in fixed.items()}
    for rows in range(1, ROWS + 1):
        device.reset(1)
        with gpu.timeline.launch_path() as account:
            for plan in plans(rows, 3):
                device.launch(plan).wait()  # type: ignore[union-attr]
        bucket = graphs.bucket(rows)
        assert rows <= bucket <= ROWS
        assert bucket == min(size for size in graphs.sizes if size >= rows)
        forward, sampling = graphs._forward[bucket], graphs._sample[bucket, Mode.GREEDY]
        chunks = device._pieces._pieces[16].graphs if 3 * rows <= 16 else []  # type: ignore[union-attr]
        assert account.replays == [*chunks, sampling, forward, sampling, forward, sampling]
        assert all(forward.reads(tensor) for tensor in read_by_forward.values())  # type: ignore[attr-defined]
        assert all(sampling.reads(tensor) for tensor in read_by_sampling.values())  # type: ignore[attr-defined]
        for mode in (Mode.PLAIN, Mode.FILTERED):
            assert graphs._sample[bucket, mode].reads(state.sampling.words)  # type: ignore[attr-defined]
    assert {name: tensor.data_ptr() for name, tensor in fixed.items()} == addresses


@pytest.mark.emulation
def test_a_buffer_that_moved_after_the_capture_is_found(gpu: Gpu) -> None:
    """What the test above relies on."""
    device = make_device()
    play(gpu, device, plans(2, 2))
    device._step.drawn = torch.zeros_like(device._step.drawn)
    device._step.inputs = torch.zeros_like(device._step.inputs)
    torch.cuda.synchronize()  # these zeros come by another stream than the step's inputs
    with pytest.raises(SimulationError, match="died after the capture"):
        play(gpu, device, [make_plan(step=3)])


def test_capturing_shows_its_progress(gpu: Gpu) -> None:
    shown: list[tuple[str, int, int]] = []
    start(options_of("cuda"), lambda *words: shown.append(words))
    captured = [(done, total) for text, done, total in shown if text == "capturing CUDA graphs"]
    assert captured == [(done, 4) for done in range(5)]


@pytest.mark.emulation
def test_a_step_with_chunks_runs_by_pieces_between_attentions(gpu: Gpu) -> None:
    """Padded tokens: 3 + 5 of 16; they write nothing, not even into the dummy page."""
    device = make_device()
    groups, pieces = attention_of(device).groups, device._pieces
    assert pieces is not None
    late = make_row(5, [9, 8, 7, 6, 5], [30, 31])
    play(gpu, device, plans(3, 3))
    before = {group: [gpu.peek(x).clone() for x in (pages.keys, pages.values)] for group, pages in groups.items()}
    with gpu.timeline.launch_path() as account:
        deferred = device.launch(both_groups(make_plan(step=4, admits=(late,), chunks=i32(5, 5, 1))))
    assert account.replays[:-1] == pieces._pieces[16].graphs
    assert len(pieces._pieces[16].graphs) == MODEL.num_layers + 1
    assert isinstance(deferred, Deferred)
    assert len(ids_of(deferred.wait())) == 4
    for group, pages in groups.items():
        written = set(gpu.peek(pages.kv_slots)[:8].tolist())
        for old, new in zip(before[group], (pages.keys, pages.values), strict=True):
            assert changed_slots(old, gpu.peek(new)) == written


def test_what_one_piece_leaves_for_the_next_must_be_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Lives, "now", lambda self: [])
    device = make_device()
    with pytest.raises(SimulationError, match="died after the capture"):
        play(gpu, device, plans(3, 1))


@pytest.mark.parametrize(
    ("most", "busy", "sizes"),
    [
        (8, 9999, ()),
        (16, 0, (16,)),
        (100, 9999, (16, 32, 64)),
        (4096, 0, (16, 32, 64, 128, 192, 256)),
        (4096, 600, (16, 32, 64, 128, 192, 256, 384, 512)),
        (1000, 9999, (16, 32, 64, 128, 192, 256, 384, 512, 768)),
        (4096, 9999, SIZES),
    ],
)
def test_sizes_of_steps_with_chunks(most: int, busy: int, sizes: tuple[int, ...]) -> None:
    assert token_sizes(most, busy) == sizes


def test_small_models_have_graphs_of_more_tokens() -> None:
    assert busy_tokens(LLAMA_8B) == pytest.approx(115, abs=3)
    assert busy_tokens(QWEN3_06B) == pytest.approx(1590, abs=20)
    mixture = msgspec.structs.replace(LLAMA_8B, num_experts=64, experts_per_token=2, expert_size=1024)
    assert busy_tokens(mixture) > 2 * busy_tokens(LLAMA_8B)


def test_enforce_eager_captures_nothing(gpu: Gpu) -> None:
    device = make_device(enforce_eager=True)
    with gpu.timeline.launch_path() as account:
        results = [device.launch(plan) for plan in plans(3, 4)]
    assert account.replays == []
    assert [len(ids_of(result.wait())) for result in results] == [3, 3, 3, 3]  # type: ignore[union-attr]
