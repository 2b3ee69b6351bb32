"""Two replicas of two ranks each, all stages but the edge's sockets in one process: who gets which message."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest

from detokenizer_proc.loop import DetokenizerLoop
from engine.config import ServeConfig
from engine.documents import Surroundings, stage_config
from engine.hangs import HangWatch
from engine.runtime.stage import Handler
from proto.config import Options, ServerOptions, StageConfig, options_of
from proto.ids import Address, StageKind
from proto.messages import (
    INBOXES,
    Abort,
    Accepted,
    Admit,
    Census,
    Deltas,
    Facts,
    Finish,
    Message,
    Outgoing,
    Reset,
    StageInfo,
    StepPlan,
    StepResult,
    World,
    column,
)
from proto.metrics import METRICS
from scheduler.core import Scheduler
from scheduler.loop import SchedulerLoop, WorkerLostError
from server.generation import Generation
from server.record import Record
from server.validate import Ask
from tests.builders import i32, make_facts, make_stage, make_world
from tests.scheduler_fakes import FakeWorker, token_at
from tests.text_requests import make_params
from tests.tiny_tokenizers import byte_level, manifest
from tokenizer_proc.loop import TokenizerLoop
from worker.device import Completion, StepClock
from worker.loop import WorkerLoop
from worker.ranks.followers import FollowerLoop, Followers

REPLICAS, RANKS = 2, 2
SERVER = Address(StageKind.SERVER, 0)
NEW_TOKENS = 12


class Device:
    """A rank's device: the pages and slots that plans speak of, checked."""

    def __init__(self, vocab_size: int) -> None:
        self.facts = make_facts(vocab_size=vocab_size)
        self.clock = StepClock()
        self.steps: list[tuple[int, int]] = []  # (epoch, step)
        self.seeds: set[int] = set()  # of the requests that came
        self._worker = FakeWorker(self.facts)

    def reset(self, epoch: int) -> None:
        self._worker.reset(Reset(epoch))

    def launch(self, plan: StepPlan) -> Completion:
        self.steps.append((plan.epoch, plan.step))
        self.seeds |= {row.sampling.seed for row in plan.admits}
        self._worker.run(plan)
        return Completion(self._worker.results.popleft(), due=0)


class Link:
    """An outbox."""

    def __init__(self, fleet: "Fleet", sender: Address, to: Address) -> None:
        self._fleet, self._sender, self._to = fleet, sender, to

    def send(self, message: Message) -> None:
        self._fleet.send(self._sender, self._to, message)

    def send_encoded(self, body: bytes) -> None:
        self.send(msgspec.msgpack.decode(body, type=INBOXES[self._to.kind]))


class FakeStage:
    """What `engine.runtime.stage.Stage` is to a handler, without a socket."""

    def __init__(self, fleet: "Fleet", config: StageConfig) -> None:
        self.config = config
        self.address = config.address
        self.world = make_world()
        self._fleet = fleet

    @property
    def options(self) -> Options:
        return options_of(self.config)

    def outbox(self, to: Address) -> Link:
        return Link(self._fleet, self.address, to)

    def find(self, address: Address) -> StageInfo | None:
        return next((info for info in self.world.stages if info.address == address), None)

    def ready(self, facts: Facts = None) -> None:
        pass


class Fleet:
    """Every stage as the supervisor plans them, started from its own documents."""

    def __init__(self, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = manifest(tokenizer)
        self.sent: list[tuple[Address, Address, Message]] = []
        self.deaf: set[Address] = set()  # these get nothing
        self._queue: deque[tuple[Address, Message]] = deque()
        config = ServeConfig(model="m", data_parallel_size=REPLICAS, tensor_parallel_size=RANKS, num_pages=64)
        around = Surroundings(model, 1, "/run", -1, 1)
        self.stages: dict[Address, Any] = {
            address: FakeStage(self, stage_config(config, around, address, incarnation))
            for incarnation, address in enumerate(config.addresses, 2)
        }
        self.devices = {
            address: Device(model.config.vocab_size) for address in self.stages if address.kind is StageKind.WORKER
        }
        monkeypatch.setattr("worker.loop.OutputThread", self._output)
        monkeypatch.setattr("scheduler.loop.tame_gc", lambda: None)  # it is meant for a process of its own
        self.handlers = {address: self._handler(address) for address in self.stages if address != SERVER}
        options = self.stages[SERVER].options
        assert isinstance(options, ServerOptions)
        self.record = Record(SERVER.index, 2, options)
        self.tell_world()

    def _output(self, _run_dir: str, sender: Address, _incarnation: int, to: Address) -> Any:
        """In place of a worker's thread that sends results when the device has them."""
        fleet = self

        class Output:
            def put(self, completion: Completion) -> None:
                fleet.send(sender, to, completion.message)

            def aim(self, incarnation: int) -> None:
                pass

        return Output()

    def _handler(self, address: Address) -> Handler:
        stage = self.stages[address]
        match address.kind:
            case StageKind.TOKENIZER:
                return TokenizerLoop(stage)
            case StageKind.SCHEDULER:
                return SchedulerLoop(stage)
            case StageKind.DETOKENIZER:
                return DetokenizerLoop(stage)
            case _:
                device: Any = self.devices[address]
                if address.rank:
                    return FollowerLoop(stage, device)
                return WorkerLoop(stage, device, Followers(stage, RANKS))

    def world(self, **incarnations: int) -> World:
        """Everybody is ready; `incarnations` of stages that were replaced, by the names of their inboxes."""
        return make_world(
            *(
                make_stage(
                    address.kind,
                    incarnation=incarnations.get(str(address), stage.config.incarnation),
                    address=address,
                    facts=self.devices[address].facts if address in self.devices else None,
                )
                for address, stage in self.stages.items()
            )
        )

    def tell_world(self) -> None:
        for address, handler in self.handlers.items():
            self.stages[address].world = self.world()
            handler.on_message(self.stages[address].world)
        self.deliver()

    def send(self, sender: Address, to: Address, message: Message) -> None:
        self.sent.append((sender, to, message))
        self._queue.append((to, message))

    def send_all(self, out: list[Outgoing]) -> None:
        for to, message in out:
            self.send(SERVER, to, message)

    def deliver(self) -> None:
        while self._queue:
            to, message = self._queue.popleft()
            if to == SERVER:
                self._on_server(message)
            elif to not in self.deaf:
                self.handlers[to].on_message(message)

    def _on_server(self, message: Message) -> None:
        match message:
            case Deltas():
                self.send_all(self.record.on_deltas(message, 1))
            case Accepted():
                self.record.on_accepted(message)

    def turn(self) -> None:
        """Each stage's loop once round."""
        self.deliver()
        for handler in self.handlers.values():
            handler.step(time.monotonic_ns())

    def begin(self, seed: int) -> Generation:
        params = make_params(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        sampling = msgspec.structs.replace(params.sampling, seed=seed)
        params = msgspec.structs.replace(params, sampling=sampling)
        ask = Ask("", None, i32(5 + seed, 7, 9), None, params)
        generation, submit = self.record.open_generation(ask, 10, arrival=1, now=0.0)
        self.send_all([submit])
        return generation

    def run(self, generations: list[Generation]) -> None:
        end = time.monotonic() + 20
        while not all(generation.over for generation in generations):
            assert time.monotonic() < end, "some generations never end"
            self.turn()

    def of(self, kind: type[Message]) -> list[tuple[Address, Address, Message]]:
        return [entry for entry in self.sent if isinstance(entry[2], kind)]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(byte_level(tmp_path / "tokenizer.json"), monkeypatch)


def ids_of(generation: Generation) -> list[int]:
    piece = generation.take_piece()
    assert piece is not None
    assert piece.ending is not None
    assert piece.ending.finish is Finish.LENGTH
    return [int(token) for token in column(piece.ids)]


def test_the_supervisor_plans_replicas_of_ranks() -> None:
    config = ServeConfig(model="m", data_parallel_size=REPLICAS, tensor_parallel_size=RANKS)
    assert [str(address) for address in config.addresses] == [
        "server-0",
        "tokenizer-0",
        "scheduler-0",
        "worker-0-0",
        "worker-0-1",
        "scheduler-1",
        "worker-1-0",
        "worker-1-1",
        "detokenizer-0",
    ]
    assert config.addresses[-2].title == "quintet worker 1 rank 1"


def test_plans_and_results_stay_within_a_replica(fleet: Fleet) -> None:
    generations = [fleet.begin(seed) for seed in range(8)]
    fleet.run(generations)
    vocab = fleet.devices[Address(StageKind.WORKER, 0)].facts.vocab_size
    for seed, generation in enumerate(generations):
        assert ids_of(generation) == [token_at(seed, 3 + n, vocab, set(), 3) for n in range(NEW_TOKENS)]
    # Every replica had half of the requests, and both of its ranks the same plans.
    for replica in range(REPLICAS):
        mine = {seed for seed, generation in enumerate(generations) if generation.replica == replica}
        first, second = (fleet.devices[Address(StageKind.WORKER, replica, rank)] for rank in range(RANKS))
        assert len(mine) == 4
        assert first.seeds == second.seeds == mine
        assert first.steps == second.steps
        assert {epoch for epoch, _ in first.steps} == {
            fleet.stages[Address(StageKind.SCHEDULER, replica)].config.incarnation
        }
    for sender, to, _ in fleet.of(StepPlan) + fleet.of(Reset):
        assert sender.replica == to.replica
        assert (sender.kind, to.rank) in ((StageKind.SCHEDULER, 0), (StageKind.WORKER, 1))
    results = fleet.of(StepResult)
    assert {(sender, to) for sender, to, _ in results} == {
        (Address(StageKind.WORKER, replica, 0), Address(StageKind.SCHEDULER, replica)) for replica in range(REPLICAS)
    }


def test_an_abort_goes_to_every_scheduler_and_ends_one_request(fleet: Fleet) -> None:
    generations = [fleet.begin(seed) for seed in range(4)]
    while generations[1].ids_received < 2:
        fleet.turn()
    fleet.send_all(fleet.record.close_generation(generations[1]))
    fleet.run([generation for generation in generations if generation is not generations[1]])
    assert [to for _, to, _ in fleet.of(Abort)] == [Address(StageKind.SCHEDULER, r) for r in range(REPLICAS)]
    assert generations[1].ids_received < NEW_TOKENS
    for generation in (generations[0], *generations[2:]):
        assert len(ids_of(generation)) == NEW_TOKENS
    counters = [fleet.handlers[Address(StageKind.SCHEDULER, r)].heartbeat().counters for r in range(REPLICAS)]
    assert [counter["aborted"] for counter in counters] == [
        float(replica == generations[1].replica) for replica in range(REPLICAS)
    ]
    assert all(counter["running"] == 0 for counter in counters)


def test_every_stage_reports_the_metrics_of_its_table(fleet: Fleet) -> None:
    """Beside those that `engine.runtime.stage` adds to all of them."""
    added = {"backlog", "dropped_stale", "loop_busy_share"}
    for address, handler in fleet.handlers.items():
        beat = handler.heartbeat()
        names = {metric.name for metric in METRICS[address.kind]}
        assert beat.counters.keys() | beat.histograms.keys() | added == names


def test_a_census_asks_each_replica_for_its_own(fleet: Fleet) -> None:
    generations = [fleet.begin(seed) for seed in range(4)]
    while not all(generation.ids_received for generation in generations):
        fleet.turn()
    for to, census in fleet.record.census():
        assert isinstance(census, Census)
        rids = {int(rid) for rid in column(census.rids, "<u8")}  # type: ignore[arg-type]
        assert rids == {generation.rid for generation in generations if generation.replica == to.replica}
        assert len(rids) == 2
    assert {to for _, to, _ in fleet.of(Admit)} == {Address(StageKind.SCHEDULER, r) for r in range(REPLICAS)}


@pytest.mark.parametrize("renamed", [metric.name for metric in METRICS[StageKind.SCHEDULER]])
def test_a_lost_plan_is_found_whatever_counters_are_called(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, renamed: str
) -> None:
    """From the scheduler's own heartbeats to the supervisor's judgement of its worker."""
    scheduler = Address(StageKind.SCHEDULER, 1)
    honest = Scheduler.counters
    monkeypatch.setattr(
        Scheduler, "counters", lambda self: {f"new_{n}" if n == renamed else n: v for n, v in honest(self).items()}
    )
    watch = HangWatch(list(fleet.stages), stall=10.0)
    generations = [fleet.begin(seed) for seed in range(4)]
    while not all(generation.ids_received for generation in generations):
        fleet.turn()
    fleet.deaf.add(Address(StageKind.WORKER, 1, rank=0))
    stuck = []
    for second in range(15):
        for _ in range(50):
            fleet.turn()
        watch.on_heartbeat(scheduler, fleet.handlers[scheduler].heartbeat(), float(second))
        stuck.append(watch.is_stuck(1, float(second)))
    assert stuck[0] is False
    assert stuck[-1] is True


@pytest.mark.parametrize("lost", ["worker-1-0", "worker-1-1"])
def test_a_rank_that_was_replaced_is_the_loss_of_its_own_replica(fleet: Fleet, lost: str) -> None:
    world = fleet.world(**{lost: 99})
    for replica in range(REPLICAS):
        address = Address(StageKind.SCHEDULER, replica)
        fleet.stages[address].world = world
        if replica == 0:
            fleet.handlers[address].on_message(world)
        else:
            with pytest.raises(WorkerLostError, match="a rank of worker 1 was replaced or has ended"):
                fleet.handlers[address].on_message(world)
