"""Steps on the emulated GPU, which does all of it late and in random legal orders, against the CPU's runner.

Every launch runs where hidden waits and copies of pageable memory raise.
"""

import threading
from typing import Any

import pytest
import torch

from proto.channel import Context, Inbox, decode_as
from proto.ids import Address, StageKind
from proto.messages import Desync, RowStatus, StepResult, TokenLogprobs
from tests.builders import i32, make_plan, make_row
from tests.cuda_cases import (
    LatePair,
    assert_close,
    attention_of,
    both_groups,
    changed_slots,
    expected,
    ids_of,
    launch,
    make_device,
    options_of,
    plans,
    play,
    silent,
    submit,
    told,
)
from tests.flashinfer_double import Gpu, SimulationError, simulate
from tests.marks import mark_rest
from worker.cuda.sampling import Mode
from worker.cuda.start import start
from worker.device import Completion, Deferred
from worker.output import OutputThread

# --------------------------------------------------------------------------- a scheduler before it


@pytest.mark.parametrize(
    ("depth", "seed", "settings", "changes"),
    mark_rest(
        pytest.mark.emulation,
        [
            (2, 2, {}, {}),
            (1, 1, {}, {}),
            (3, 3, {}, {}),
            (2, 4, {}, {"enforce_eager": True}),
            (3, 5, {"prefix_caching": True, "debug_preempt_every": 4}, {}),
            (3, 6, {"num_pages": 20}, {"enforce_eager": True}),
            (2, 7, {"prefix_caching": True, "debug_preempt_every": 4}, {"deterministic": True}),
        ],
    ),
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


# --------------------------------------------------------------------------- a few plans


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


@pytest.mark.emulation
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
@pytest.mark.emulation
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


@pytest.mark.emulation
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


@pytest.mark.emulation
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


# --------------------------------------------------------------------------- edges


@pytest.mark.emulation
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


@pytest.mark.emulation
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


@pytest.mark.emulation
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


@pytest.mark.emulation
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
