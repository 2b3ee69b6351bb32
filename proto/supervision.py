"""Messages between the supervisor and the stages: what a stage is, can do and counts, and which stages are alive."""

from enum import IntEnum

import msgspec

from proto.ids import Address
from proto.message import Message


class WorkerFacts(Message, frozen=True, tag="worker_facts"):
    """What a worker found it can do."""

    num_pages: int  # of group 0 (see StepPlan); 0 = no layer attends to all positions
    page_size: int
    max_model_len: int  # the smallest of the flag, the model and what the pages hold
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    device: str
    dtype: str
    kv_bytes_per_token: int
    window: int = 0  # positions that layers of group 1 attend to, the token's own included; 0 = there is no such group
    window_pages: int = 0  # of group 1
    max_step_ids: int = 1  # the highest limit of a decode row (see StepPlan)


class TokenizerFacts(Message, frozen=True, tag="tokenizer_facts"):
    vocab_size: int  # ids that the tokenizer knows
    eos_ids: tuple[int, ...]
    has_chat_template: bool


class ServerFacts(Message, frozen=True, tag="server_facts"):
    address: str  # host:port that it serves


Facts = WorkerFacts | TokenizerFacts | ServerFacts | None


class Ready(Message, frozen=True, tag="ready"):
    """Every stage → supervisor, once: it is ready."""

    pid: int  # its own; with --wrap the supervisor's child is the wrapper
    schema: str
    facts: Facts = None


class Progress(Message, frozen=True, tag="progress"):
    """Starting stage → supervisor: how far a long start has come."""

    text: str
    done: int
    total: int  # 0 = unknown


class Histogram(Message, frozen=True, tag="histogram"):
    """How the values of one quantity are spread, since the process started."""

    counts: tuple[int, ...]  # of each bucket of the metric (`proto.metrics`), then of the values above them all
    sum: float


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Every stage → supervisor, once a second. The source of all metrics.

    A busy stage whose `progress` stands still may hang; see `engine.hangs`. Counters and histograms, by the names of
    `proto.metrics`, are for people to read: nothing is decided by them.
    """

    counters: dict[str, float]  # gauges too
    busy: bool = False  # there is work that ought to make progress
    progress: int = 0  # grows with every piece of work done
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)


class Serving(Message, frozen=True, tag="serving"):
    """Server → supervisor: it accepts calls, and the ring has generated a token."""


class DrainRequest(Message, frozen=True, tag="drain_request"):
    """Server → supervisor: Control.Drain was called."""


class Drained(Message, frozen=True, tag="drained"):
    """Server → supervisor: no stream is open any more."""


class StageState(IntEnum):
    STARTING = 0
    READY = 1
    STOPPED = 2  # SIGSTOP: alive but not running
    DEAD = 3


class StageInfo(Message, frozen=True, tag="stage"):
    """What the supervisor knows of one process."""

    address: Address
    incarnation: int
    pid: int = 0
    state: StageState = StageState.READY
    facts: Facts = None
    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    restarts: int = 0
    counters: dict[str, float] = msgspec.field(default_factory=dict)  # of the last heartbeat, like the histograms
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)


class World(Message, frozen=True, tag="world"):
    """Supervisor → every stage, at each change and once a second: the state of all processes."""

    stages: tuple[StageInfo, ...] = ()
    draining: bool = False
    failure: str = ""  # not empty: the instance is ending because of this


class Stop(Message, frozen=True, tag="stop"):
    """Supervisor → stage: finish at once and exit 0."""
