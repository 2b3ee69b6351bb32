"""The life of an instance, as decisions: no process, socket, clock or terminal is touched here.

Events go in (a stage was started, spoke, ended, was looked at; somebody asks for a stop; time passes), actions
come out, in order. `engine.supervisor` brings the events and carries out the actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from engine.hangs import HangWatch
from engine.runtime.stage import ExitCode
from engine.stages import (
    Action,
    Announce,
    Kill,
    Say,
    StageRecord,
    Start,
    Tell,
    Vitals,
    advise,
    describe_end,
    describe_progress,
)
from proto.ids import SUPERVISOR, Address, StageKind
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

_WORLD_SECONDS = 1.0
_PROGRESS_SECONDS = 2.0  # between lines about the same long work
# Streams must have ended with UNAVAILABLE within 2 s of a death, and everything within 5 s.
_FAREWELL_SECONDS = 1.5  # for servers to end their streams
_FAILED_STOP_SECONDS = 1.5
_STOP_SECONDS = 5.0
_WRAPPED_STOP_SECONDS = 60.0  # a profiler writes its report when its stage has ended
_KILL_SECONDS = 2.0
# More time than this between two ticks means that we slept ourselves (a suspended machine, a stopped supervisor); the
# stages cannot be blamed for their silence then.
_LONGEST_TICK = 2.0


class Phase(Enum):
    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()  # a stop was requested: streams may finish
    FAILING = auto()  # a stage is lost: servers tell their callers
    STOPPING = auto()  # every stage was told to end
    KILLING = auto()  # stages that did not end are being killed
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    startup: float  # for which a starting stage may be silent
    stall: float  # for which a ready stage may be silent without using CPU
    drain: float


class InstanceLifecycle:
    """The state of an instance. Every event returns the actions that it calls for."""

    def __init__(self, stages: Sequence[tuple[Address, bool]], limits: Limits, incarnation: int, pid: int) -> None:
        """`stages` are addresses, each with whether it runs under a wrapper; `incarnation` and `pid` are our own."""
        self.stages = {address: StageRecord(address, wrapped) for address, wrapped in stages}
        self.phase = Phase.STARTING
        self.failure = ""
        self._limits = limits
        self._hangs = HangWatch(list(self.stages), limits.stall)
        self._last_incarnation = incarnation
        self._supervisor = StageRecord(
            SUPERVISOR, wrapped=False, incarnation=incarnation, pid=pid, state=StageState.READY
        )
        self._time = 0.0  # seconds that we were awake
        self._last_tick: float | None = None
        self._next_world = 0.0
        self._deadline = 0.0  # of the phase, where it has one
        self._killed: set[Address] = set()
        self._actions: list[Action] = []

    @property
    def exit_code(self) -> int | None:
        """Exit code of the instance: OK after a requested stop, FAILED after a failure; None while it runs."""
        if self.phase is not Phase.ENDED:
            return None
        return ExitCode.FAILED if self.failure else ExitCode.OK

    def world(self) -> World:
        """Make a snapshot for the stages."""
        stages = (self._supervisor, *self.stages.values())
        # Callers get the first line; the rest is for the operator.
        failure = self.failure.partition("\n")[0]
        return World(tuple(stage.info() for stage in stages), self._draining, failure)

    # ------------------------------------------------------------------ events

    def begin(self, now: float) -> list[Action]:
        """Start every stage. `now` is in seconds of any monotonic clock, here and below."""
        self._last_tick = now
        self._extend_startup()
        for stage in self.stages.values():
            self._start(stage)
        return self._take_actions()

    def on_spawned(self, address: Address, pid: int) -> list[Action]:
        stage = self.stages[address]
        stage.pid = pid
        stage.exited = False
        return self._take_actions()

    def on_message(self, address: Address, message: Message) -> list[Action]:
        """A stage spoke."""
        stage = self.stages.get(address)
        if stage is None or not stage.lives:
            return []
        self._hangs.on_message(address, self._time)
        match message:
            case Ready():
                self._on_ready(stage, message)
            case Progress():
                self._on_progress(stage, message)
            case Heartbeat():
                self._on_heartbeat(stage, message)
            case Serving():
                self._on_serving(stage)
            case Drained():
                stage.drained = True
                self._after_drained()
            case DrainRequest():
                self._ask_to_stop("requested through Control.Drain")
        return self._take_actions()

    def on_unreadable(self, error: str) -> list[Action]:
        """A stage sent what this process cannot decode."""
        self._fail(f"{error}.\nThe code changed on disk: start the instance again.")
        return self._take_actions()

    def on_exit(self, address: Address, status: int | None, last_lines: Sequence[str]) -> list[Action]:
        """A child was reaped. `status` is its exit code, or minus its signal; None = unknown."""
        stage = self.stages[address]
        stage.exited = True
        self._on_loss(stage, describe_end(status), advise(status, stage.address.kind), last_lines)
        return self._take_actions()

    def on_vitals(self, address: Address, vitals: Vitals | None, last_lines: Sequence[str]) -> list[Action]:
        """The state of a stage's process was read; None = it is gone, though its wrapper may not be."""
        stage = self.stages[address]
        if not stage.lives:
            return []
        if vitals is None or vitals.state in "ZX":
            if stage.wrapped and not stage.exited:
                self._on_loss(stage, "ended under its wrapper", advise(None, address.kind), last_lines)
            return self._take_actions()
        stage.rss_bytes, stage.cpu_seconds = vitals.rss_bytes, vitals.cpu_seconds
        self._hangs.on_cpu_time(address, vitals.cpu_seconds, self._time)
        if vitals.state == "T":  # not "t": a debugger or profiler holds it for a while
            advice = "It received SIGSTOP, or ^Z from a terminal; everything that waited for it stood still."
            self._on_loss(stage, "was stopped by a signal", advice, last_lines, StageState.STOPPED)
        return self._take_actions()

    def on_supervisor_vitals(self, vitals: Vitals) -> None:
        """Our own state was read."""
        self._supervisor.rss_bytes, self._supervisor.cpu_seconds = vitals.rss_bytes, vitals.cpu_seconds

    def on_terminate(self, reason: str) -> list[Action]:
        """A signal such as SIGTERM: finish the streams, then end. Another one changes nothing."""
        self._ask_to_stop(reason)
        return self._take_actions()

    def on_interrupt(self) -> list[Action]:
        """SIGINT: the first acts like SIGTERM, the second stops at once, the third kills."""
        match self.phase:
            case Phase.DRAINING:
                self._stop("stopping now")
            case Phase.STOPPING:
                self._kill()
            case _:
                self._ask_to_stop("interrupted")
        return self._take_actions()

    def on_startup_error(self, reason: str) -> list[Action]:
        """A stage could not be started."""
        self._fail(reason)
        return self._take_actions()

    def tick(self, now: float) -> list[Action]:
        """Time passes: several times a second."""
        if self._last_tick is not None:
            self._time += min(now - self._last_tick, _LONGEST_TICK)
        self._last_tick = now
        match self.phase:
            case Phase.STARTING:
                self._look_at_startup()
            case Phase.DRAINING if self._time >= self._deadline:
                self._stop(f"stopping: streams were still open after --drain-timeout {self._limits.drain:g} s")
            case Phase.FAILING if self._time >= self._deadline:
                self._stop()
            case Phase.STOPPING if self._time >= self._stop_deadline():
                self._kill()
            case Phase.KILLING if self._time >= self._deadline:
                stuck = ", ".join(stage.title for stage in self.stages.values() if not stage.exited)
                self._do(Say(f"could not be killed: {stuck}"))
                self.phase = Phase.ENDED
            case _:
                pass
        self._look_for_hangs()
        if self._time >= self._next_world:
            self._tell_world(to_starting=False)
        return self._take_actions()

    # ------------------------------------------------------------------ starting

    def _start(self, stage: StageRecord) -> None:
        self._last_incarnation += 1
        stage.incarnation = self._last_incarnation
        self._hangs.on_message(stage.address, self._time)
        self._do(Start(stage.address, stage.incarnation))

    def _on_ready(self, stage: StageRecord, ready: Ready) -> None:
        if ready.schema != SCHEMA_HASH:
            self._fail(
                f"{stage.title} has message schema {ready.schema}, the supervisor {SCHEMA_HASH}.\n"
                "The code changed on disk: start the instance again."
            )
            return
        stage.pid = ready.pid
        stage.facts = ready.facts
        stage.state = StageState.READY
        self._extend_startup()
        self._do(Say(f"{stage.title} is ready"))
        self._tell_world()

    def _on_progress(self, stage: StageRecord, progress: Progress) -> None:
        self._extend_startup()
        finished = 0 < progress.total <= progress.done
        if finished or progress.text != stage.progress or self._time >= stage.progress_shown + _PROGRESS_SECONDS:
            stage.progress, stage.progress_shown = progress.text, self._time
            self._do(Say(f"{stage.title}: {describe_progress(progress)}"))

    def _on_serving(self, stage: StageRecord) -> None:
        stage.serving = True
        if self.phase is Phase.STARTING and all(server.serving for server in self._servers()):
            self.phase = Phase.SERVING
            self._do(Announce())

    def _extend_startup(self) -> None:
        if self.phase is Phase.STARTING:
            self._deadline = self._time + self._limits.startup

    def _look_at_startup(self) -> None:
        if self._time < self._deadline:
            return
        late = [stage.title for stage in self.stages.values() if stage.state is StageState.STARTING]
        what = f"not ready: {', '.join(late)}" if late else "all stages are ready, but no token came through"
        self._fail(
            f"start-up made no progress for --startup-timeout {self._limits.startup:g} s ({what}).\n"
            "  Raise the limit if the machine is slow; --log-level debug shows what the stages do."
        )

    def _on_heartbeat(self, stage: StageRecord, beat: Heartbeat) -> None:
        address = stage.address
        stage.counters, stage.histograms = beat.counters, beat.histograms
        self._hangs.on_heartbeat(address, beat, self._time)
        if address.kind is StageKind.SCHEDULER and self._hangs.is_stuck(address.replica, self._time):
            # Which rank holds up the others is not known: rank 0 stands for all of them.
            worker = self.stages[Address(StageKind.WORKER, address.replica, rank=0)]
            if self._may_hang(worker):
                self._on_hang(worker, "sequences are running, but no step was made")

    def _look_for_hangs(self) -> None:
        for address, stage in self.stages.items():
            if self._may_hang(stage) and self._hangs.is_silent(address, self._time):
                self._on_hang(stage, "no heartbeat came")

    def _may_hang(self, stage: StageRecord) -> bool:
        return stage.state is StageState.READY and self.phase in (Phase.STARTING, Phase.SERVING, Phase.DRAINING)

    def _on_hang(self, stage: StageRecord, missing: str) -> None:
        how = f"hangs: {missing} and no CPU time was used for --stall-timeout {self._limits.stall:g} s"
        self._on_loss(stage, how, "Please report it, with the log above.", (), StageState.STOPPED)

    # ------------------------------------------------------------------ ending

    def _on_loss(
        self,
        stage: StageRecord,
        how: str,
        advice: str,
        last_lines: Sequence[str],
        state: StageState = StageState.DEAD,
    ) -> None:
        """A stage died, was stopped, or hangs. With replay, this is where it will be started again."""
        already_lost = not stage.lives
        stage.state = state
        match self.phase:
            case Phase.STARTING | Phase.SERVING | Phase.DRAINING if not already_lost:
                when = " while starting" if self.phase is Phase.STARTING else ""
                words = "".join(f"\n    {line}" for line in last_lines)
                self._fail(
                    f"{stage.title} (pid {stage.pid}) {how}{when}."
                    + (f"\n  Its last lines:{words}" if words else "")
                    + f"\n  {advice}"
                )
            case Phase.FAILING:
                self._after_drained()
            case Phase.STOPPING | Phase.KILLING if all(other.exited for other in self.stages.values()):
                self.phase = Phase.ENDED
            case Phase.STOPPING if state is StageState.STOPPED:
                self._kill_one(stage)
            case _:
                pass

    def _fail(self, reason: str) -> None:
        if self.failure or self.phase in (Phase.STOPPING, Phase.KILLING, Phase.ENDED):
            return
        had_streams = self.phase is not Phase.STARTING
        self.failure = reason
        self._do(Say(f"error: {reason}"))
        if had_streams:
            self.phase = Phase.FAILING
            self._deadline = self._time + _FAREWELL_SECONDS
            self._tell_world()
            self._after_drained()
        else:
            self._stop()

    def _ask_to_stop(self, reason: str) -> None:
        if self.phase is Phase.STARTING:
            self._stop(f"stopping: {reason}")
        elif self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING
            self._deadline = self._time + self._limits.drain
            self._do(Say(f"draining: {reason}"))
            self._tell_world()

    def _after_drained(self) -> None:
        if self.phase not in (Phase.DRAINING, Phase.FAILING):
            return
        if all(server.drained or server.state is not StageState.READY for server in self._servers()):
            self._stop()

    def _stop(self, text: str = "") -> None:
        if text:
            self._do(Say(text))
        self.phase = Phase.STOPPING
        self._deadline = self._time + (_FAILED_STOP_SECONDS if self.failure else _STOP_SECONDS)
        for stage in self.stages.values():
            if stage.exited:
                continue
            # A stage that loads a model may not read its inbox for minutes, and has nothing to lose.
            if stage.state in (StageState.STOPPED, StageState.STARTING):
                self._kill_one(stage)
            else:
                self._do(Tell(stage.address, Stop()))
        if all(stage.exited for stage in self.stages.values()):
            self.phase = Phase.ENDED

    def _stop_deadline(self) -> float:
        waits_for_report = not self.failure and any(s.wrapped and not s.exited for s in self.stages.values())
        return self._deadline + (_WRAPPED_STOP_SECONDS if waits_for_report else 0.0)

    def _kill(self) -> None:
        self.phase = Phase.KILLING
        self._deadline = self._time + _KILL_SECONDS
        late = [stage for stage in self.stages.values() if not stage.exited]
        if late and not self.failure:
            self._do(Say(f"killing stages that did not stop: {', '.join(stage.title for stage in late)}"))
        for stage in late:
            self._kill_one(stage)

    def _kill_one(self, stage: StageRecord) -> None:
        if stage.address not in self._killed:
            self._killed.add(stage.address)
            self._do(Kill(stage.address))

    # ------------------------------------------------------------------ helpers

    @property
    def _draining(self) -> bool:
        return self.phase not in (Phase.STARTING, Phase.SERVING)

    def _servers(self) -> list[StageRecord]:
        return [stage for address, stage in self.stages.items() if address.kind is StageKind.SERVER]

    def _tell_world(self, to_starting: bool = True) -> None:
        """Starting stages may not read their inbox for minutes, so they are sent changes only."""
        self._next_world = self._time + _WORLD_SECONDS
        world = self.world()
        for stage in self.stages.values():
            if stage.state is StageState.READY or (to_starting and stage.state is StageState.STARTING):
                self._do(Tell(stage.address, world))

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
