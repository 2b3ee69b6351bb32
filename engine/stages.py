"""Stages as the supervisor sees them: what it knows of each, does with it, and tells of its work and end."""

import signal
from dataclasses import dataclass, field

from proto.ids import Address, StageKind
from proto.messages import Facts, Histogram, Progress, StageInfo, StageState, Stop, World


@dataclass(frozen=True, slots=True)
class Vitals:
    """What /proc says of one process."""

    state: str  # one letter: R S D T t Z X …
    cpu_seconds: float
    rss_bytes: int


@dataclass(slots=True)
class StageRecord:
    """One stage as the supervisor knows it. Only InstanceLifecycle writes it."""

    address: Address
    wrapped: bool
    incarnation: int = 0
    pid: int = 0  # of the stage itself; until its Ready, of the process that we started (a wrapper's, if there is one)
    state: StageState = StageState.STARTING
    exited: bool = True  # there is no child: not started yet, or reaped
    facts: Facts = None
    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    restarts: int = 0
    progress: str = ""  # what a long start is at
    progress_shown: float = 0.0
    serving: bool = False
    drained: bool = False

    @property
    def title(self) -> str:
        return self.address.title

    @property
    def lives(self) -> bool:
        return self.state is not StageState.DEAD

    def info(self) -> StageInfo:
        return StageInfo(
            address=self.address,
            incarnation=self.incarnation,
            pid=self.pid,
            state=self.state,
            facts=self.facts,
            rss_bytes=self.rss_bytes,
            cpu_seconds=self.cpu_seconds,
            restarts=self.restarts,
            counters=self.counters,
            histograms=self.histograms,
        )


# What the lifecycle asks the supervisor to do.


@dataclass(frozen=True, slots=True)
class Start:
    """Start this stage's process."""

    address: Address
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to a stage."""

    address: Address
    message: World | Stop


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to a stage's process group, and to its own pid should that be elsewhere."""

    address: Address


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class Announce:
    """The instance serves: publish its address."""


Action = Start | Tell | Kill | Say | Announce


def describe_progress(progress: Progress) -> str:
    """Say what is being done, with a percentage if the total is known."""
    if progress.total:
        return f"{progress.text} {100 * progress.done // progress.total}%"
    return progress.text


def describe_end(status: int | None) -> str:
    """Say how a process ended, by its exit code or minus its signal; None = unknown."""
    if status is None:
        return "ended"
    if status < 0:
        return f"was killed by {_signal_name(-status)}"
    return f"ended with exit code {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def advise(status: int | None, kind: StageKind) -> str:
    """Say what the operator can do about such an end."""
    if status == -signal.SIGKILL:
        flags = "--num-pages or --kv-cache-memory-bytes" if kind is StageKind.WORKER else "--max-in-flight-bytes"
        return f"Unless someone sent that signal, the machine ran out of memory (see dmesg): lower {flags}."
    if status is not None and status < 0:
        return "It crashed in native code: please report it, with the lines above."
    return "Its log above says why; --log-level debug shows more."
