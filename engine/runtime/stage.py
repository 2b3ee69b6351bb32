"""What the main of every stage is made of: config, death pipe, title, logging, signals, inbox loop, heartbeat.

A stage's `__main__` reads

    stage = Stage.boot(StageKind.SCHEDULER)          # before heavy imports
    from scheduler.loop import SchedulerLoop          # then those
    stage.run(SchedulerLoop(stage))

The server, whose loop is asyncio's, uses the parts of `Stage` instead of `run`.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn, Protocol

import msgspec

from engine.runtime.death import tie_to_parent
from proto.channel import ChannelError, Context, Inbox, Outbox, flush_all
from proto.config import Options, StageConfig, load_config, options_of
from proto.ids import SUPERVISOR, Address, StageKind
from proto.messages import (
    SCHEMA_HASH,
    Facts,
    Heartbeat,
    Message,
    Progress,
    Ready,
    StageInfo,
    StageState,
    Stop,
    World,
)

log = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error; this process ends"

HEARTBEAT_SECONDS = 1.0
_IDLE_SECONDS = 0.1
_RETRY_SECONDS = 0.001  # between attempts to hand over a backlog
_LAST_WORDS_SECONDS = 0.5  # for handing over the backlog at exit
_GC_THRESHOLD = 100_000


class ExitCode(IntEnum):
    """How a process of an instance ends by itself."""

    OK = 0
    FAILED = 1  # the supervisor's, when it lost a stage
    REFUSED = 2  # what was asked for cannot be had; the last line says why
    CHANNEL = 3  # its inbox cannot be bound, or a message cannot be decoded
    BUG = 4
    PEER_LOST = 5  # a rank's, when another rank ended


class Handler(Protocol):
    """What a stage adds to the loop. All calls come from one thread."""

    def on_message(self, message: Message) -> None:
        """Take one message; never blocks."""

    def step(self, now: int) -> float | None:
        """Do what there is to do after the inbox was drained. `now` is monotonic ns.

        Returns the seconds after which it wants to be called again without a message (0 = at once), or
        None when only a message can give it work.
        """

    def heartbeat(self) -> Heartbeat:
        """Report counters and progress. Called once a second."""


class BusyShare:
    """Measures the share of its time in which a loop does not wait for messages."""

    def __init__(self, now: float) -> None:
        self.idle = 0.0  # seconds of waiting, added by the loop
        self._since = now

    def measure(self, now: float) -> float:
        """Return the share since the last call, 0..1."""
        elapsed = max(now - self._since, 1e-9)
        share = min(max(1.0 - self.idle / elapsed, 0.0), 1.0)
        self._since, self.idle = now, 0.0
        return share


class Stage:
    """A process's place in the instance: its address, inbox and outboxes, and the state of the other stages."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.address = config.address
        self.world = World()
        self.stopping = False
        self._context = Context()
        self.inbox = Inbox(self._context, config.run_dir, self.address, config.incarnation)
        self._outboxes: dict[Address, Outbox] = {}
        self.outbox(SUPERVISOR).address_incarnation(config.supervisor_incarnation)
        self._next_heartbeat = 0.0

    @classmethod
    def boot(cls, kind: StageKind) -> "Stage":
        """Set up a stage's process, first thing in its main. The config's path is argv[1]."""
        if len(sys.argv) != 2:
            raise SystemExit(f"usage: python -P -m {sys.argv[0]} CONFIG.json")
        try:
            config = load_config(sys.argv[1])
        except (OSError, msgspec.DecodeError) as error:
            raise SystemExit(f"{sys.argv[1]} is not the configuration of a stage: {error}") from error
        if config.kind is not kind:
            raise SystemExit(f"{sys.argv[1]} configures a {config.kind.label}, not a {kind.label}")
        tie_to_parent(config.death_fd)
        set_title(config.address)
        _setup_logging(str(config.address), config.log_level)
        # A terminal's ^C and a service manager's SIGTERM to the whole group are the supervisor's to answer: it
        # drains first, then sends Stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if config.death_fd >= 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            stage = cls(config)
        except ChannelError as error:
            raise SystemExit(str(error)) from error
        if config.death_fd < 0:
            signal.signal(signal.SIGTERM, lambda _signum, _frame: stage.stop())
        return stage

    @property
    def options(self) -> Options:
        """Options of this stage's kind; narrow with an assertion on the type."""
        return options_of(self.config)

    def outbox(self, to: Address) -> Outbox:
        """Return the one outbox to that stage, connected at first use."""
        if to not in self._outboxes:
            self._outboxes[to] = Outbox(self._context, self.config.run_dir, self.address, self.config.incarnation, to)
            self._aim(to)
        return self._outboxes[to]

    def find(self, address: Address) -> StageInfo | None:
        """Return what the supervisor last said of a stage."""
        return next((info for info in self.world.stages if info.address == address), None)

    def ready(self, facts: Facts = None) -> None:
        """Report to the supervisor that this stage is ready."""
        self.outbox(SUPERVISOR).send(Ready(pid=os.getpid(), schema=SCHEMA_HASH, facts=facts))

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """Report to the supervisor how far a long start has come."""
        self.outbox(SUPERVISOR).send(Progress(text=text, done=done, total=total))

    def adopt_world(self, world: World) -> None:
        """Address outboxes to the incarnations of a snapshot, and drop what older ones still send."""
        self.world = world
        for info in world.stages:
            self.inbox.drop_older(info.address, info.incarnation)
        for to in self._outboxes:
            self._aim(to)

    def _aim(self, to: Address) -> None:
        info = self.find(to)
        if info is not None:
            self._outboxes[to].address_incarnation(info.incarnation)

    def stop(self) -> None:
        self.stopping = True

    def flush(self) -> bool:
        """Send what is queued; return whether nothing is left."""
        empty = True
        for outbox in self._outboxes.values():
            if outbox.backlog and not outbox.flush():
                empty = False
        return empty

    def send_heartbeat(self, make: Callable[[], Heartbeat]) -> None:
        """Send a heartbeat, with the counters of every stage added to its own, if one is due."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            beat = make()
            beat.counters["backlog"] = float(sum(outbox.backlog for outbox in self._outboxes.values()))
            beat.counters["dropped_stale"] = float(self.inbox.dropped_stale)
            self.outbox(SUPERVISOR).send(beat)

    def run(self, handler: Handler) -> NoReturn:
        """Run until told to stop, then end the process."""
        try:
            self._loop(handler)
        except ChannelError as error:
            log.critical("%s", error)
            self.exit(ExitCode.CHANNEL)
        except Exception:
            log.critical(INTERNAL_ERROR, exc_info=True)
            self.exit(ExitCode.BUG)
        self.exit(ExitCode.OK)

    def _loop(self, handler: Handler) -> None:
        pause: float | None = 0.0
        share = BusyShare(time.monotonic())

        def heartbeat() -> Heartbeat:
            beat = handler.heartbeat()
            beat.counters["loop_busy_share"] = share.measure(time.monotonic())
            return beat

        while not self.stopping:
            self.send_heartbeat(heartbeat)
            wait = _IDLE_SECONDS if pause is None else min(pause, _IDLE_SECONDS)
            if not self.flush():
                wait = min(wait, _RETRY_SECONDS)
            if wait > 0:
                began = time.monotonic()
                self.inbox.wait(wait)
                share.idle += time.monotonic() - began
            for message in self.inbox.drain():
                self._dispatch(handler, message)
            pause = handler.step(time.monotonic_ns())

    def _dispatch(self, handler: Handler, message: Message) -> None:
        if isinstance(message, Stop):
            self.stop()
            return
        if isinstance(message, World):
            self.adopt_world(message)
        handler.on_message(message)

    def exit(self, code: int) -> NoReturn:
        """Deliver what waits, then end at once: the interpreter's own way out loses messages."""
        left = flush_all(self._outboxes.values(), _LAST_WORDS_SECONDS)
        if left:
            log.warning("%d messages were not delivered: their receivers do not read", left)
        for outbox in self._outboxes.values():
            outbox.close()
        self.inbox.close()
        self._context.close()
        sys.stderr.flush()
        os._exit(code)


def set_title(address: Address) -> None:
    """Give this process its title."""
    from setproctitle import setproctitle

    setproctitle(address.title)


def _setup_logging(stage: str, level: str) -> None:
    """Log to stderr, one line a record, with stage and pid."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {stage} %(process)d %(name)s: %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def tame_gc() -> None:
    """Make the collector run seldom, and never look at what exists by now: for stages that make no reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def is_ready(info: StageInfo | None) -> bool:
    return info is not None and info.state is StageState.READY
