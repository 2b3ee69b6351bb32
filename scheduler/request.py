"""One request inside the scheduler."""

from dataclasses import dataclass
from enum import IntEnum

from proto.messages import ID_BYTES, Sampling, WorkClass
from scheduler.prefix import Path
from scheduler.stops import StopSet


class State(IntEnum):
    QUEUED = 0
    PREFILL = 1  # in a slot; chunks of its known ids are still to be planned
    DECODE = 2  # in a slot; all known ids are planned
    ENDED = 3


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows of one attempt. Its fields are written by its own methods only, its path by the tree.

    What changes with every token stands in the columns of `Rows`, not here.
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

    # ---------------------------------------------------------------- what happens to it

    def adopt_ids(self, ids: bytes) -> None:
        """Set all ids that are known by now."""
        self.ids = ids
        self.tokens = len(ids) // ID_BYTES

    def queue(self, ticket: int, order: int) -> None:
        """Enter the queue, with this ticket and this virtual arrival."""
        self.state = State.QUEUED
        self.ticket = ticket
        self.order = order

    def dequeue(self) -> None:
        self.ticket = 0

    def count_overtake(self) -> None:
        self.overtaken += 1

    def set_long(self, long: bool) -> None:
        self.long = long

    def expect_pages(self, pages: int) -> None:
        """Set the pages that it will hold at its end, as estimated when it is placed."""
        self.expected_pages = pages

    def enter_slot(self, slot: int, hit_pages: int, page_size: int) -> None:
        """Enter a slot, with the K/V of its first ids in pages that were hit."""
        self.state = State.PREFILL
        self.slot = slot
        self.hit_pages = hit_pages
        self.done = hit_pages * page_size
        self.overtaken = 0

    def plan_chunk(self, tokens: int) -> None:
        """Count its next ids as planned."""
        self.done += tokens

    def note_placement(self, now: int, cached_tokens: int, long: bool) -> None:
        """Keep when it was first placed, and how much of its prompt was cached then."""
        self.long = long
        if not self.first_scheduled:
            self.first_scheduled = now
            self.cached_tokens = min(cached_tokens, self.prompt_len)

    def start_decoding(self) -> None:
        self.state = State.DECODE

    def leave_slot(self) -> None:
        self.slot = -1

    def count_preemption(self) -> None:
        self.preemptions += 1

    def mark_opened(self) -> None:
        self.opened = True

    def count_miss(self) -> None:
        self.misses += 1

    def clear_misses(self) -> None:
        self.misses = 0

    def end(self) -> None:
        self.state = State.ENDED

    # ---------------------------------------------------------------- what it is

    @property
    def prefill_only(self) -> bool:
        return self.max_len == self.prompt_len

    @property
    def resumed(self) -> int:
        """Number of output ids that were known when it was last queued."""
        return self.tokens - self.prompt_len
