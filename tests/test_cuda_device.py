"""Steps on the emulated GPU, which does all of it late and in random legal orders, against the CPU's runner.

Every launch runs where hidden waits and copies of pageable memory raise.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from proto.channel import Context, Inbox, decode_as
from proto.config import WorkerOptions
from proto.ids import Address, StageKind
from proto.messages import Desync, Finish, RowStatus, Sampling, StepPlan, StepResult, TokenLogprobs, column
from proto.model import ModelConfig, RopeConfig
from scripts.gpu.speed import LLAMA_8B, QWEN3_06B
from tests.builders import GREEDY, i32, make_plan, make_row, make_worker_options
from tests.flashinfer_double import Gpu, SimulationError, simulate
from tests.pair import Pair, Story
from tests.test_worker_tables import behind_window
from worker.cpu.start import start as start_cpu
from worker.cuda.device import CudaDevice
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.frames import Frames
from worker.cuda.graphs import bucket_sizes
from worker.cuda.piecewise import SIZES, _Lives, busy_tokens, token_sizes
from worker.cuda.sampling import Mode
from worker.cuda.start import start
from worker.device import Completion, Deferred
from worker.output import OutputThread

MODEL = ModelConfig(
    family="llama",
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position_embeddings=64,
    windows=(0, 10),
    rope=RopeConfig(theta=10000.0),
)
ROWS = 6
PAGES = 64
DRAWN = Sampling(seed=11)
FILTERED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=12, logprobs=3)


def options_of(device: str, **changes: Any) -> WorkerOptions:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "page_size": 4,
        "num_pages": PAGES,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 24,
        "pipeline_depth": 3,
    }
    return make_worker_options(MODEL, device=device, **(settings | changes))


def silent(text: str, done: int, total: int) -> None:
    """No progress is shown."""


def attention_of(device: CudaDevice) -> FlashInferAttention:
    attention = device._step.attention
    assert isinstance(attention, FlashInferAttention)
    return attention


def make_device(**changes: Any) -> CudaDevice:
    """On the GPU that is simulated now."""
    device = start(options_of("cuda", **changes), silent)
    device.reset(1)
    return device


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulate(0) as simulated:
        yield simulated


def launch(gpu: Gpu, device: CudaDevice, plan: StepPlan) -> Deferred:
    """Queue a step; the device then gets on a little, or not at all."""
    with gpu.timeline.launch_path():
        deferred = device.launch(plan)
    assert isinstance(deferred, Deferred)
    gpu.timeline.advance(gpu.timeline.random.randrange(60))
    return deferred


def ids_of(result: StepResult) -> list[int]:
    return [int(i) for i in column(result.ids)]


# --------------------------------------------------------------------------- a scheduler before it


class Flight(deque[Any]):
    """Results on their way: the oldest is waited for when it is asked for."""

    def popleft(self) -> StepResult:
        result: StepResult = super().popleft().wait()
        return result


class LatePair(Pair):
    """`Pair` with a device whose results come late."""

    def __init__(self, gpu: Gpu, device: CudaDevice, options: WorkerOptions, **settings: Any) -> None:
        super().__init__(device, options, **settings)  # type: ignore[arg-type]
        self._gpu, self._device = gpu, device
        self._flight: Any = Flight()

    def _run(self, plan: StepPlan) -> None:
        self.steps += 1
        for slot in column(plan.released).tolist():
            del self._slots[slot]
        for row in plan.admits:
            self._slots[row.slot] = self._find(column(row.ids).tolist(), row.sampling)
        self._flight.append(launch(self._gpu, self._device, plan))
        self.deepest = max(self.deepest, len(self._flight))


def submit(pair: Pair) -> None:
    """Prompts within and beyond a page and a step; greedy, drawn, filtered; stop ids before a least length."""
    generator = np.random.default_rng(3)
    lengths = [5, 1, 30, 8, 13, 4, 9, 17]
    prompts = [generator.integers(0, MODEL.vocab_size, n).tolist() for n in lengths]
    some = list(range(0, MODEL.vocab_size, 3))
    for prompt, sampling in zip(prompts, [GREEDY, DRAWN, FILTERED, GREEDY] * 2, strict=True):
        pair.submit(prompt, 4 + len(prompt) % 9, sampling=sampling)
    pair.submit(prompts[2], 9, sampling=GREEDY)  # a prefix of somebody's, if the cache is on
    pair.submit(prompts[0], 8, sampling=FILTERED, min_new_tokens=4, stop_ids=some, num_eos=1)
    pair.submit(prompts[4], 8, min_new_tokens=3, stop_ids=some)


def told(pair: Pair) -> list[tuple[list[int], Finish]]:
    return [(story.tokens, story.finish) for story in pair.stories.values()]


@cache
def expected(prefix_caching: bool = False, preempt: int = 0) -> tuple[list[tuple[list[int], Finish]], list[Story]]:
    """By the CPU's runner."""
    options = options_of("reference")
    runner = start_cpu(options, silent)
    pair = Pair(runner, options, depth=1, prefix_caching=prefix_caching, debug_preempt_every=preempt)
    submit(pair)
    pair.run()
    return told(pair), list(pair.stories.values())


@pytest.mark.parametrize(
    ("depth", "seed", "settings", "changes"),
    [
        (1, 1, {}, {}),
        (2, 2, {}, {}),
        (3, 3, {}, {}),
        (2, 4, {}, {"enforce_eager": True}),
        (3, 5, {"prefix_caching": True, "debug_preempt_every": 4}, {}),
        (3, 6, {"num_pages": 20}, {"enforce_eager": True}),
        (2, 7, {"prefix_caching": True, "debug_preempt_every": 4}, {"deterministic": True}),
    ],
    ids=str,
)
def test_tokens_are_the_cpus(depth: int, seed: int, settings: dict[str, Any], changes: dict[str, Any]) -> None:
    reference, stories = expected()
    with simulate(seed) as gpu:
        options = options_of("cuda", **changes)
        pair = LatePair(gpu, start(options, silent), options, depth=depth, **settings)
        submit(pair)
        pair.run()
        assert told(pair) == reference
        assert pair.deepest == depth
        pair.check_idle()
    for mine, theirs in zip(pair.stories.values(), stories, strict=True):
        for ours, wanted in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert_close(decode_as(ours, TokenLogprobs), decode_as(wanted, TokenLogprobs))
    assert sum(len(story.logprobs) for story in stories) > 15


def assert_close(ours: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert ours.top_ids == wanted.top_ids
    assert ours.chosen == pytest.approx(wanted.chosen, abs=1e-4)
    assert ours.top_logprobs[0] == pytest.approx(wanted.top_logprobs[0], abs=1e-4)


# --------------------------------------------------------------------------- a few plans


def both_groups(plan: StepPlan) -> StepPlan:
    """With pages of MODEL's windowed layer too."""
    return behind_window(plan, MODEL.window, alone=False)


def plans(rows: int, steps: int) -> list[StepPlan]:
    """So many requests in one prefill step, then decode steps of all."""
    admits = tuple(
        make_row(slot, [7 * slot + 1, slot + 2, 5], [5 * slot + i for i in range(5)]) for slot in range(rows)
    )
    chunks = i32(*(value for slot in range(rows) for value in (slot, 3, 1)))
    first = both_groups(make_plan(admits=admits, chunks=chunks))
    second = make_plan(step=2, decode_slots=i32(*range(rows)))
    return [first, second, *(make_plan(step=step) for step in range(3, steps + 1))]


def play(gpu: Gpu, device: CudaDevice, script: list[StepPlan], depth: int = 3) -> list[list[int]]:
    """Ids of each step, with so many in flight."""
    flight: deque[Deferred] = deque()
    results = []
    for plan in script:
        if len(flight) == depth:
            results.append(flight.popleft().wait())
        flight.append(launch(gpu, device, plan))
    results += [deferred.wait() for deferred in flight]
    return [ids_of(result) for result in results]


def test_a_launch_waits_for_nothing_and_the_answer_comes_when_asked_for(gpu: Gpu) -> None:
    device = make_device()
    for plan in plans(3, 4):
        with gpu.timeline.launch_path() as account:
            deferred = device.launch(plan)
        assert account.waits == []
        assert isinstance(deferred, Deferred)
    with gpu.timeline.launch_path() as account:
        last = device.launch(make_plan(step=5))
    assert isinstance(last, Deferred)
    assert len(account.replays) == 2  # a forward pass and its sampling
    assert len(account.eager) <= 10, account.eager
    with gpu.timeline.launch_path(), pytest.raises(SimulationError):  # what the above would have raised
        torch.cuda.synchronize()
    assert len(ids_of(last.wait())) == 3


def test_a_row_that_enters_a_page_has_its_page_ids_built_anew(gpu: Gpu) -> None:
    device = make_device()
    entered = []
    for plan in plans(2, 12):
        with gpu.timeline.launch_path() as account:
            deferred = device.launch(plan)
        assert isinstance(deferred, Deferred)
        deferred.wait()
        entered.append(any("searchsorted" in name for name in account.eager))
    # Positions 3, 4, 5, … of pages of 4: the first decode of a new list of rows, then every fourth; and at position 13
    # the layer with a window of 10 lets go of its first page.
    assert entered == [True, True] + [step % 4 == 3 or step == 12 for step in range(3, 13)]


@pytest.mark.parametrize("rows", [3, 5])
def test_padding_rows_touch_no_live_page_and_rows_write_their_own_place_only(gpu: Gpu, rows: int) -> None:
    device = make_device()
    script = plans(rows, 7)
    play(gpu, device, script[:2])
    groups = attention_of(device).groups
    assert len(groups) == 2
    for plan in script[2:]:
        before = {group: [gpu.peek(x).clone() for x in (pages.keys, pages.values)] for group, pages in groups.items()}
        play(gpu, device, [plan])
        for group, pages in groups.items():
            written = gpu.peek(pages.kv_slots)[:rows].long()
            padding = gpu.peek(pages.kv_slots)[rows : device._graphs.bucket(rows)]  # type: ignore[union-attr]
            assert padding.tolist() == [pages.dummy_slot]
            for old, new in zip(before[group], (pages.keys, pages.values), strict=True):
                changed = changed_slots(old, gpu.peek(new))
                assert changed <= {*written.tolist(), pages.dummy_slot}
                assert len(changed - {pages.dummy_slot}) == rows


def changed_slots(old: torch.Tensor, new: torch.Tensor) -> set[int]:
    """Of K or V of all layers of a group."""
    return set((old != new).flatten(1, 2).any(-1).any(-1).any(0).nonzero().flatten().tolist())


def test_what_lies_in_the_dummy_page_changes_no_bit_of_a_live_row() -> None:
    logits = []
    for poison in (0.0, 1e4):
        with simulate(1) as gpu:
            device = make_device()
            play(gpu, device, plans(3, 3))
            for pages in attention_of(device).groups.values():
                for kept in (pages.keys, pages.values):
                    kept[:, pages.dummy_page].fill_(poison)
            torch.cuda.synchronize()
            play(gpu, device, [make_plan(step=4)])
            logits.append(gpu.peek(device._step.logits)[:3])
    assert torch.equal(*logits)


def test_a_replay_gives_the_bits_of_the_same_work_done_eagerly(gpu: Gpu) -> None:
    device = make_device()
    step, graphs = device._step, device._graphs
    assert graphs is not None
    script = plans(5, 5)
    play(gpu, device, script[:1])
    for plan in script[1:]:
        before = gpu.peek(step.state.last_tokens)
        play(gpu, device, [plan])
        replayed = [gpu.peek(tensor) for tensor in (step.logits, step.drawn, step.state.last_tokens)]
        # The inputs and attention's plan are still there; only the tokens that the step began with are gone.
        step.state.last_tokens.copy_(before)
        torch.cuda.synchronize()
        with torch.inference_mode(), torch.cuda.stream(device._compute):
            step.decode(graphs.bucket(5))
            step.sample(graphs.bucket(5), Mode.GREEDY)
        eager = [gpu.peek(tensor) for tensor in (step.logits, step.drawn, step.state.last_tokens)]
        for ours, theirs in zip(replayed, eager, strict=True):
            assert torch.equal(ours[:5], theirs[:5])


# --------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("most", [1, 2, 3, 6, 8, 9, 60, 64, 100, 256, 257, 512, 1000])
def test_buckets(most: int) -> None:
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert {1, 2, 4, 8} & set(range(most)) <= set(sizes)
    assert all(after <= 2 * size for size, after in itertools.pairwise(sizes))


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


# --------------------------------------------------------------------------- planted mistakes


def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step uses the pinned memory of the one before, whose copies may be on their way."""
    monkeypatch.setattr(Frames, "take", lambda self: _only(self))


def _only(frames: Frames) -> Any:
    frames._free[0].used = 0
    return frames._free[0]


def given_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is free for the next step as soon as its own is launched."""
    take = Frames.take

    def hasty(self: Frames) -> Any:
        frame = take(self)
        self._free.appendleft(frame)
        return frame

    monkeypatch.setattr(Frames, "take", hasty)


def copy_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy back does not wait for the end of its step. (The first wait of each launch is sampling's.)"""
    real = torch.cuda.Stream.wait_event

    def forgetful(self: Any, event: Any) -> None:
        if self is not forgetful.compute:  # type: ignore[attr-defined]
            return
        real(self, event)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", forgetful)


def sample_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step draws while what was drawn before is still being copied."""
    monkeypatch.setattr(CudaDevice, "_read", property(lambda self: None, lambda self, event: None), raising=False)


@cache
def raced() -> tuple[list[StepPlan], list[list[int]]]:
    """Plans, and the ids that are right."""
    script = plans(4, 6)
    with simulate(0) as gpu:
        return script, play(gpu, make_device(max_num_seqs=4), script, depth=1)


PLANTS = [None, no_turns, given_too_early, copy_before_the_step, sample_before_the_copy]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_races_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of three orders: two random ones, and one in which copies back come as late as they may."""
    script, right = raced()
    caught = 0
    for seed in range(3):
        with simulate(seed) as gpu, monkeypatch.context() as patches:
            device = make_device(max_num_seqs=4)
            if plant is not None:
                plant(patches)
            if plant is copy_before_the_step:
                torch.cuda.Stream.wait_event.compute = device._compute  # type: ignore[attr-defined]
            if seed == 2:
                patches.setattr(gpu.timeline.random, "choice", lambda streams: streams[0])
                patches.setattr(gpu.timeline, "advance", lambda operations: None)
            try:
                caught += play(gpu, device, script) != right
            except (SimulationError, RuntimeError, IndexError):
                caught += 1
    assert (caught > 0) is (plant is not None)


# --------------------------------------------------------------------------- edges


def test_more_steps_in_flight_than_foreseen_are_right_too(gpu: Gpu) -> None:
    script = plans(3, 8)
    right = play(gpu, make_device(), script, depth=1)
    assert play(gpu, make_device(pipeline_depth=1), script, depth=8) == right


def test_steps_without_rows_or_samples_answer_in_their_turn(gpu: Gpu) -> None:
    device = make_device()
    script = [
        both_groups(make_plan(admits=(make_row(0, [1, 2, 3], [0]),), chunks=i32(0, 2, 0))),
        make_plan(step=2, chunks=i32(0, 1, 1)),
        make_plan(step=3, released=i32(0), decode_slots=b""),
        make_plan(step=4),
    ]
    assert [len(ids) for ids in play(gpu, device, script)] == [0, 1, 0, 0]


def test_a_break_in_the_numbers_and_a_reset_with_steps_in_flight(gpu: Gpu) -> None:
    device = make_device()
    script = plans(2, 4)
    right = play(gpu, make_device(), script, depth=1)
    flight = [launch(gpu, device, plan) for plan in script[:3]]
    lost = make_plan(step=9)
    assert device.launch(lost) == Completion(Desync(epoch=1, step=9, expected_epoch=1, expected_previous=3), due=0)
    assert device.launch(script[3]) is None
    device.reset(1)
    again = [launch(gpu, device, plan) for plan in script]
    assert [ids_of(deferred.wait()) for deferred in [*flight, *again]] == right[:3] + right


def test_a_poisoned_row_is_named_and_its_neighbours_unharmed(gpu: Gpu) -> None:
    device = make_device()
    script = plans(3, 3)
    right = play(gpu, make_device(), script, depth=1)
    model: Any = device._step.model
    model.embedding.weight.tensor[7 * 1 + 1] = float("nan")  # the first id of slot 1
    results = [launch(gpu, device, plan) for plan in script]
    for ids, deferred in zip(right, results, strict=True):
        result = deferred.wait()
        assert list(result.statuses) == [RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK]
        assert ids_of(result) == [ids[0], 0, ids[2]]


def test_the_clock_runs_by_the_devices_own_times(gpu: Gpu) -> None:
    device = make_device()
    flight = [launch(gpu, device, plan) for plan in plans(3, 4)]
    results = [deferred.wait() for deferred in flight]
    assert all(result.device_ns > 0 for result in results)
    counters = device.clock.counters()
    assert (counters["steps"], counters["tokens"]) == (4, 12)
    assert counters["device_busy_seconds"] == pytest.approx(sum(result.device_ns for result in results) / 1e9)
    assert 0 < counters["device_busy_share"] <= 1


# --------------------------------------------------------------------------- the thread that waits


def test_the_output_thread_waits_for_the_device_and_keeps_the_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = str(tmp_path_factory.mktemp("o"))  # a short name: ipc paths end at 107 bytes
    scheduler, worker = Address(StageKind.SCHEDULER, 0), Address(StageKind.WORKER, 0)
    context = Context()
    inbox = Inbox(context, run_dir, scheduler, 1)
    output = OutputThread(run_dir, worker, 1, scheduler)
    output.aim(1)
    done = threading.Event()

    def wait() -> StepResult:
        assert done.wait(20)
        return answer(1)

    def answer(step: int) -> StepResult:
        return StepResult(epoch=1, step=step, ids=b"", counts=b"", statuses=b"", logprobs=(), device_ns=1, idle_ns=0)

    try:
        output.put(Deferred(wait))
        output.put(Completion(answer(2), due=0))
        inbox.wait(0.05)
        assert not list(inbox.drain(limit=5))
        done.set()
        received: list[Any] = []
        while len(received) < 2:
            assert inbox.wait(20)
            received += inbox.drain(limit=5)
        assert received == [answer(1), answer(2)]
    finally:
        done.set()
        output.close()
        inbox.close()
        context.close()
