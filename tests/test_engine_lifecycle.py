"""The supervisor's decisions, without processes and in a time of their own."""

import signal

import pytest

from engine.lifecycle import InstanceLifecycle, Limits, Phase
from engine.stages import Action, Announce, Kill, Say, Start, Tell, Vitals
from proto.ids import Address, StageKind
from proto.messages import (
    SCHEMA_HASH,
    Drained,
    DrainRequest,
    Heartbeat,
    Message,
    Progress,
    Ready,
    Serving,
    StageState,
    Stop,
    World,
)

SERVER, TOKENIZER, SCHEDULER, WORKER, DETOKENIZER = ADDRESSES = [
    Address(kind, 0)
    for kind in (
        StageKind.SERVER,
        StageKind.TOKENIZER,
        StageKind.SCHEDULER,
        StageKind.WORKER,
        StageKind.DETOKENIZER,
    )
]
LIMITS = Limits(startup=60.0, stall=10.0, drain=30.0)


class Play:
    """Drives a lifecycle as the supervisor does, and keeps what it did."""

    def __init__(self, addresses: list[Address] = ADDRESSES, wrapped: frozenset[Address] = frozenset()) -> None:
        self.now = 1000.0
        self.done: list[Action] = []
        self.lifecycle = InstanceLifecycle([(address, address in wrapped) for address in addresses], LIMITS, 1, 100)
        self._pids = {address: 200 + number for number, address in enumerate(addresses)}
        for action in self.lifecycle.begin(self.now):
            assert isinstance(action, Start)
            self.take(self.lifecycle.on_spawned(action.address, self._pids[action.address]))

    def take(self, actions: list[Action]) -> list[Action]:
        self.done += actions
        return actions

    def hear(self, address: Address, message: Message) -> list[Action]:
        return self.take(self.lifecycle.on_message(address, message))

    def ready(self, address: Address, schema: str = SCHEMA_HASH) -> list[Action]:
        return self.hear(address, Ready(pid=self._pids[address], schema=schema))

    def serve(self) -> "Play":
        for address in self._pids:
            self.ready(address)
        for address in self._pids:
            if address.kind is StageKind.SERVER:
                self.hear(address, Serving())
        assert self.lifecycle.phase is Phase.SERVING
        return self

    def exit(self, address: Address, status: int | None = 0, lines: tuple[str, ...] = ()) -> list[Action]:
        return self.take(self.lifecycle.on_exit(address, status, lines))

    def exit_all(self) -> None:
        for address, stage in self.lifecycle.stages.items():
            if not stage.exited:
                self.exit(address)

    def look(self, address: Address, state: str = "S", cpu: float = 1.0) -> list[Action]:
        return self.take(self.lifecycle.on_vitals(address, Vitals(state, cpu, 1 << 20), ()))

    def pass_time(self, seconds: float, heartbeats: bool = True) -> list[Action]:
        """Time as the supervisor lives it, with everybody ready sending heartbeats."""
        start = len(self.done)
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            if heartbeats:
                for address, stage in self.lifecycle.stages.items():
                    if stage.state is StageState.READY:
                        self.hear(address, Heartbeat({}))
            self.take(self.lifecycle.tick(self.now))
        return self.done[start:]

    def said(self) -> str:
        return "\n".join(action.text for action in self.done if isinstance(action, Say))


def told(actions: list[Action], kind: type[World] | type[Stop]) -> list[Address]:
    return [a.address for a in actions if isinstance(a, Tell) and isinstance(a.message, kind)]


def test_all_stages_start_at_once_with_incarnations_of_their_own() -> None:
    stages = Play().lifecycle.stages.values()
    assert [stage.incarnation for stage in stages] == [2, 3, 4, 5, 6]


def test_it_announces_once_every_server_serves() -> None:
    second = Address(StageKind.SERVER, 1)
    play = Play([*ADDRESSES, second])
    for address in (*ADDRESSES, second):
        play.ready(address)
    play.hear(SERVER, Serving())
    assert Announce() not in play.done
    assert Announce() in play.hear(second, Serving())


def test_every_ready_is_told_to_all_and_facts_travel_in_the_world() -> None:
    play = Play()
    actions = play.ready(WORKER)
    assert told(actions, World) == ADDRESSES
    world = next(a.message for a in actions if isinstance(a, Tell))
    assert isinstance(world, World)
    states = {info.address.kind: info.state for info in world.stages}
    assert states.pop(StageKind.SUPERVISOR) is StageState.READY
    assert states.pop(StageKind.WORKER) is StageState.READY
    assert set(states.values()) == {StageState.STARTING}


def test_the_world_is_told_every_second_but_not_to_those_that_may_not_read_yet() -> None:
    play = Play()
    play.ready(WORKER)
    actions = play.pass_time(5.0)
    assert set(told(actions, World)) == {WORKER}
    assert 4 <= len(told(actions, World)) <= 6


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
def test_a_death_while_serving_ends_streams_then_everything(address: Address) -> None:
    play = Play().serve()
    actions = play.exit(address, -signal.SIGKILL, ("loading", "last words"))
    assert set(told(actions, World)) == set(ADDRESSES) - {address}
    message = actions[[isinstance(a, Tell) for a in actions].index(True)]
    assert isinstance(message, Tell)
    assert isinstance(message.message, World)
    assert play.lifecycle.stages[address].title in message.message.failure
    assert "last words" not in message.message.failure, "the operator's, not the callers'"
    if address != SERVER:
        assert not told(actions, Stop), "servers end their streams first"
        actions = play.hear(SERVER, Drained())
    assert set(told(actions, Stop)) == set(ADDRESSES) - {address}
    play.exit_all()
    assert play.lifecycle.exit_code == 1
    said = play.said()
    assert f"{play.lifecycle.stages[address].title} (pid " in said
    assert "was killed by SIGKILL" in said
    assert "last words" in said
    assert "ran out of memory" in said


def test_a_server_that_does_not_answer_delays_the_end_by_less_than_two_seconds() -> None:
    play = Play().serve()
    play.exit(WORKER, 1)
    assert set(told(play.pass_time(1.8), Stop)) == set(ADDRESSES) - {WORKER}
    killed = [a.address for a in play.pass_time(1.4) if isinstance(a, Kill)]
    assert set(killed) == set(ADDRESSES) - {WORKER}
    play.exit_all()
    assert play.lifecycle.exit_code == 1


def test_what_the_kernel_does_not_let_go_does_not_hold_the_supervisor() -> None:
    play = Play().serve()
    play.exit(WORKER, 1)
    play.pass_time(6.0)
    assert play.lifecycle.exit_code == 1
    assert "could not be killed: quintet server 0, " in play.said()


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
def test_a_stopped_stage_is_lost_at_once_and_killed(address: Address) -> None:
    play = Play().serve()
    actions = play.look(address, "T")
    assert "was stopped by a signal" in play.said()
    if address != SERVER:
        actions = play.hear(SERVER, Drained())
    assert Kill(address) in actions


def test_a_traced_stage_is_left_alone() -> None:
    play = Play().serve()
    assert not play.look(WORKER, "t")
    assert play.lifecycle.phase is Phase.SERVING


def test_a_death_at_start_needs_no_farewell() -> None:
    play = Play()
    play.ready(TOKENIZER)
    actions = play.exit(WORKER, 7, ("weights are corrupt",))
    assert told(actions, Stop) == [TOKENIZER]
    assert {a.address for a in actions if isinstance(a, Kill)} == {SERVER, SCHEDULER, DETOKENIZER}
    assert "ended with exit code 7 while starting" in play.said()
    play.exit_all()
    assert play.lifecycle.exit_code == 1


def test_what_cannot_even_be_started_stops_those_that_were() -> None:
    lifecycle = InstanceLifecycle([(address, False) for address in ADDRESSES], LIMITS, 1, 100)
    lifecycle.begin(0.0)
    lifecycle.on_spawned(SERVER, 200)
    actions = lifecycle.on_startup_error("'nsys' cannot be started: No such file or directory")
    assert actions[1:] == [Kill(SERVER)]
    lifecycle.on_exit(SERVER, -9, ())
    assert lifecycle.exit_code == 1


def test_start_up_without_progress_ends() -> None:
    play = Play()
    play.ready(SERVER)
    for _ in range(3):
        play.pass_time(59.0)
        assert play.lifecycle.phase is Phase.STARTING
        play.hear(WORKER, Progress("loading", 1, 3))
    play.pass_time(61.0)
    assert (
        "--startup-timeout 60 s (not ready: quintet tokenizer 0, quintet scheduler 0, quintet worker 0" in play.said()
    )
    assert play.lifecycle.phase is not Phase.STARTING


def test_progress_is_told_now_and_then() -> None:
    play = Play()
    for done in range(101):
        play.pass_time(0.2)
        play.hear(WORKER, Progress("loading", done, 100))
    lines = [line for line in play.said().splitlines() if "loading" in line]
    assert lines[0] == "quintet worker 0 rank 0: loading 0%"
    assert lines[-1] == "quintet worker 0 rank 0: loading 100%"
    assert 8 <= len(lines) <= 13


def test_a_ring_that_passes_no_token_ends() -> None:
    play = Play()
    for address in ADDRESSES:
        play.ready(address)
    play.pass_time(61.0)
    assert "all stages are ready, but no token came through" in play.said()


def test_other_schema_means_the_code_changed() -> None:
    play = Play()
    play.ready(WORKER, schema="feedfacefeedface")
    assert "quintet worker 0 rank 0 has message schema feedfacefeedface" in play.said()
    assert "code changed on disk: start the instance again" in play.said()
    play.exit_all()
    assert play.lifecycle.exit_code == 1


def test_a_silent_stage_without_cpu_hangs() -> None:
    play = Play().serve()
    for address in ADDRESSES:
        play.look(address, "S", cpu=1.0)
    for _ in range(11):
        play.pass_time(1.0, heartbeats=False)
        for address in ADDRESSES:
            if address != SCHEDULER:
                play.hear(address, Heartbeat({}))
            play.look(address, "S", cpu=1.0)
    assert "quintet scheduler 0 (pid 202) hangs" in play.said()
    assert Kill(SCHEDULER) in play.hear(SERVER, Drained())


def test_a_silent_stage_that_computes_does_not_hang() -> None:
    """A worker in a long native call sends no heartbeat and uses its CPU."""
    play = Play().serve()
    for second in range(60):
        play.pass_time(1.0, heartbeats=False)
        for address in ADDRESSES:
            if address != WORKER:
                play.hear(address, Heartbeat({}))
            play.look(address, "R", cpu=1.0 + (second if address == WORKER else 0))
    assert play.lifecycle.phase is Phase.SERVING


@pytest.mark.parametrize(
    ("busy", "moving", "cpu", "hangs"),
    [(True, False, 0.0, True), (False, False, 0.0, False), (True, True, 0.0, False), (True, False, 0.5, False)],
    ids=["stuck", "idle", "stepping", "computing"],
)
def test_a_worker_whose_steps_stand_still_hangs(busy: bool, moving: bool, cpu: float, hangs: bool) -> None:
    """Though it sends heartbeats: its device hangs, or a plan was lost."""
    play = Play().serve()
    for second in range(13):
        play.pass_time(1.0, heartbeats=False)
        for address in ADDRESSES:
            play.look(address, "S", cpu=1.0 + (cpu * second if address == WORKER else 0))
            beat = Heartbeat({}, busy, progress=second if moving else 7) if address == SCHEDULER else Heartbeat({})
            play.hear(address, beat)
    assert ("quintet worker 0 rank 0 (pid 203) hangs: sequences are running, but no step was made" in play.said()) is (
        hangs
    )
    assert (play.lifecycle.phase is not Phase.SERVING) is hangs


@pytest.mark.parametrize(("computing", "hangs"), [(None, True), (0, False), (1, False)])
def test_a_replica_hangs_when_none_of_its_ranks_computes(computing: int | None, hangs: bool) -> None:
    """A rank that waits for another is not stuck, and one replica's steps say nothing of the other's."""
    ranks = [Address(StageKind.WORKER, replica, rank) for replica in (0, 1) for rank in (0, 1)]
    schedulers = [Address(StageKind.SCHEDULER, replica) for replica in (0, 1)]
    play = Play([SERVER, TOKENIZER, *schedulers, *ranks, DETOKENIZER]).serve()
    for second in range(13):
        play.pass_time(1.0, heartbeats=False)
        for address in (SERVER, TOKENIZER, *ranks, DETOKENIZER):
            play.hear(address, Heartbeat({}))
        for rank in ranks:
            computes = rank.replica == 1 and rank.rank == computing
            play.look(rank, "S", cpu=1.0 + (0.5 * second if computes else 0.0))
        play.hear(schedulers[0], Heartbeat({}, busy=True, progress=second))
        play.hear(schedulers[1], Heartbeat({}, busy=True, progress=7))
    assert ("quintet worker 1 rank 0 (pid 206) hangs" in play.said()) is hangs
    assert "quintet worker 0" not in "".join(line for line in play.said().splitlines() if "hangs" in line)


def test_a_supervisor_that_overslept_blames_nobody() -> None:
    play = Play().serve()
    play.now += 3600.0
    play.take(play.lifecycle.tick(play.now))
    assert play.lifecycle.phase is Phase.SERVING


@pytest.mark.parametrize("ask", ["terminate", "interrupt", "request"])
def test_a_stop_drains_then_ends_with_zero(ask: str) -> None:
    play = Play().serve()
    match ask:
        case "terminate":
            actions = play.take(play.lifecycle.on_terminate("SIGTERM"))
        case "interrupt":
            actions = play.take(play.lifecycle.on_interrupt())
        case _:
            actions = play.hear(SERVER, DrainRequest())
    worlds = [a.message for a in actions if isinstance(a, Tell)]
    assert len(worlds) == 5
    assert all(isinstance(world, World) and world.draining and not world.failure for world in worlds)
    assert not told(play.pass_time(20.0), Stop)
    assert told(play.hear(SERVER, Drained()), Stop) == ADDRESSES
    play.exit_all()
    assert play.lifecycle.exit_code == 0


def test_a_drain_ends_at_its_timeout() -> None:
    play = Play().serve()
    play.take(play.lifecycle.on_terminate("SIGTERM"))
    assert told(play.pass_time(31.0), Stop) == ADDRESSES
    assert "--drain-timeout 30 s" in play.said()
    play.exit_all()
    assert play.lifecycle.exit_code == 0


def test_two_interrupts_stop_and_three_kill() -> None:
    play = Play().serve()
    assert not told(play.take(play.lifecycle.on_interrupt()), Stop)
    assert told(play.take(play.lifecycle.on_interrupt()), Stop) == ADDRESSES
    assert {a.address for a in play.take(play.lifecycle.on_interrupt()) if isinstance(a, Kill)} == set(ADDRESSES)
    play.exit_all()
    assert play.lifecycle.exit_code == 0


def test_a_second_sigterm_does_not_cut_the_drain() -> None:
    play = Play().serve()
    play.take(play.lifecycle.on_terminate("SIGTERM"))
    assert not play.take(play.lifecycle.on_terminate("SIGTERM"))


def test_a_stop_while_starting_ends_at_once_with_zero() -> None:
    """Who still loads may not read its inbox for minutes."""
    play = Play()
    play.ready(SERVER)
    actions = play.take(play.lifecycle.on_terminate("SIGTERM"))
    assert told(actions, Stop) == [SERVER]
    assert {a.address for a in actions if isinstance(a, Kill)} == set(ADDRESSES) - {SERVER}
    play.exit_all()
    assert play.lifecycle.exit_code == 0


def test_a_death_while_draining_is_a_failure() -> None:
    play = Play().serve()
    play.take(play.lifecycle.on_terminate("SIGTERM"))
    play.exit(WORKER, -signal.SIGSEGV)
    play.hear(SERVER, Drained())
    play.exit_all()
    assert play.lifecycle.exit_code == 1
    assert "was killed by SIGSEGV" in play.said()


def test_the_first_failure_is_the_one_told() -> None:
    play = Play().serve()
    play.exit(WORKER, 3)
    play.exit(SCHEDULER, 4)
    assert play.said().count("error:") == 1
    assert "worker" in play.lifecycle.failure


def test_a_stage_that_ends_under_its_wrapper_is_lost() -> None:
    play = Play(wrapped=frozenset([WORKER])).serve()
    play.take(play.lifecycle.on_vitals(WORKER, None, ("words",)))
    assert "quintet worker 0 rank 0 (pid 203) ended under its wrapper" in play.said()


def test_a_wrapper_has_time_for_its_report() -> None:
    play = Play(wrapped=frozenset([WORKER])).serve()
    play.take(play.lifecycle.on_terminate("SIGTERM"))
    play.hear(SERVER, Drained())
    for address in ADDRESSES:
        if address != WORKER:
            play.exit(address)
    play.take(play.lifecycle.on_vitals(WORKER, None, ()))
    assert not [a for a in play.pass_time(30.0) if isinstance(a, Kill)]
    play.exit(WORKER, 0)
    assert play.lifecycle.exit_code == 0


def test_what_speaks_after_its_death_is_not_heard() -> None:
    play = Play().serve()
    play.exit(WORKER, 1)
    assert not play.ready(WORKER)
    assert play.lifecycle.stages[WORKER].state is StageState.DEAD
