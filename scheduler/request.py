"""One request inside the scheduler."""

from dataclasses import dataclass
from enum import IntEnum

from proto.messages import Sampling, WorkClass
from scheduler.prefix import Path
from scheduler.stops import StopSet

ID_BYTES = 4


class State(IntEnum):
    QUEUED = 0
    PREFILL = 1  # in a slot; chunks of its known ids are still to be planned
    DECODE = 2  # in a slot; all known ids are planned
    ENDED = 3


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows of one attempt. Written by `Scheduler` and its parts only.

    Columns that change with every token stand in `Rows`, not here.
    """

    rid: int
    attempt: int
    ids: bytes  # i32: all ids known when it was last queued (prompt, resumed and generated output)
    tokens: int  # number of these ids: what a prefill covers
    prompt_len: int
    max_len: int  # prompt + max_new_tokens
    min_len: int  # stop ids count from this length on
    sampling: Sampling
    stop_ids: bytes
    stops: StopSet
    work_class: WorkClass
    priority: int
    deadline: int  # monotonic ns, 0 = none
    arrival: int  # monotonic ns
    opening: bytes
    detokenizer: int
    path: Path
    seen: int  # monotonic ns when the scheduler got it
    state: State = State.QUEUED
    opened: bool = False  # its Opening has left
    # in the queue
    order: int = 0  # virtual arrival, see `Queues`
    ticket: int = 0  # of its queue entry; 0 = not queued
    overtaken: int = 0
    # in a slot
    slot: int = -1
    done: int = 0  # ids whose K/V are planned or cached, while in PREFILL
    long: bool = False  # its prefill takes more than half a step's budget
    hit_pages: int = 0
    expected_pages: int = 0
    # over its life
    first_scheduled: int = 0  # monotonic ns
    cached_tokens: int = 0
    preemptions: int = 0
    misses: int = 0  # censuses in a row of its server that did not list it

    def learn(self, ids: bytes) -> None:
        """Take all ids known by now."""
        self.ids = ids
        self.tokens = len(ids) // ID_BYTES

    @property
    def prefill_only(self) -> bool:
        return self.max_len == self.prompt_len

    @property
    def resumed(self) -> int:
        """Output ids that were known when it was last queued."""
        return self.tokens - self.prompt_len
