"""What the supervisor knows of its stages."""

from dataclasses import dataclass, field

from proto.ids import Address
from proto.messages import Facts, Histogram, StageInfo, StageState


@dataclass(frozen=True, slots=True)
class Vitals:
    """What /proc says of one process."""

    state: str  # one letter: R S D T t Z X …
    cpu_seconds: float
    rss_bytes: int


@dataclass(slots=True)
class Stage:
    """One stage as the supervisor knows it. Only Lifecycle writes it."""

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
