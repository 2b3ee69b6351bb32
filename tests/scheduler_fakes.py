"""What the scheduler's tests put around it: a worker that remembers what every page holds, and short messages."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from proto.config import SchedulerOptions
from proto.ids import make_rid
from proto.messages import (
    U8,
    U32,
    U64,
    Abort,
    Admit,
    AdmitRow,
    Emit,
    Finish,
    Message,
    Outgoing,
    Reject,
    Reset,
    Sampling,
    StepPlan,
    StepResult,
    WorkClass,
    WorkerFacts,
    column,
)
from scheduler.core import Scheduler
from tests.builders import i32, make_facts, make_scheduler_options

EPOCH = 7
MS = 1_000_000
_MASK = (1 << 62) - 1


def rid_of(number: int, server: int = 0, incarnation: int = 1) -> int:
    return make_rid(server, incarnation, number)


def make_admit(
    rid: int,
    prompt: list[int],
    max_new: int,
    *,
    output: list[int] | None = None,
    attempt: int = 1,
    min_new: int = 0,
    stop_ids: list[int] | None = None,
    num_eos: int | None = None,
    work_class: WorkClass = WorkClass.CHAT,
    priority: int = 0,
    salt: str = "",
    deadline: int = 0,
    arrival: int = 1,
    seed: int | None = None,
) -> Admit:
    stops = stop_ids or []
    return Admit(
        rid=rid,
        attempt=attempt,
        prompt_ids=i32(*prompt),
        output_ids=i32(*(output or [])),
        sampling=Sampling(temperature=0, seed=rid if seed is None else seed),
        max_new_tokens=max_new,
        min_new_tokens=min_new,
        stop_ids=i32(*stops),
        num_eos=len(stops) if num_eos is None else num_eos,
        work_class=work_class,
        priority=priority,
        cache_salt=salt,
        deadline=deadline,
        arrival=arrival,
        opening=f"opening {rid} {attempt}".encode(),
    )


def make_abort(*requests: tuple[int, int]) -> Abort:
    return Abort(
        rids=np.array([rid for rid, _ in requests], U64).tobytes(),
        attempts=np.array([attempt for _, attempt in requests], U32).tobytes(),
    )


# ------------------------------------------------------------------ a worker


def token_at(seed: int, position: int, vocab: int, stop_ids: set[int], min_len: int) -> int:
    """The id that the fake model samples: a function of seed and position only."""
    token = (seed * 1_000_003 + position * 7919 + (seed ^ position) * 104_729) % vocab
    while position < min_len and token in stop_ids:
        token = (token + 1) % vocab
    return token


def gain_at(seed: int, position: int, step: int, limit: int) -> int:
    """How many ids the fake model gives a row that may gain `limit`: 0 to as many, and one where that is the limit."""
    return 1 if limit == 1 else (seed * 31 + position * 17 + step * 7919) % (limit + 1)


@dataclass
class FakeSlot:
    ids: list[int]  # known and sampled
    digests: npt.NDArray[np.int64]  # of ids[:p+1] and the salt, for every position
    pages: list[int]
    windowed: dict[int, int]  # page of the group behind a window, by number
    length: int  # positions whose K/V are computed
    seed: int
    min_len: int
    stop_ids: set[int]
    salt: str
    fresh: bool = True  # admitted by the plan that runs
    gain: int = 0  # ids that the running step gives it, if it may give several


class FakeWorker:
    """Runs plans against pages that remember which prefix, of which salt, each position holds.

    It checks the protocol, that nobody writes where another row reads, and that each row reads its own prefix; behind a
    window that is all a row has there.
    """

    def __init__(self, facts: WorkerFacts, salts: dict[int, str] | None = None) -> None:
        self.facts = facts
        self.salts = salts if salts is not None else {}  # by sampling seed
        self.results: deque[StepResult] = deque()
        self.slots: dict[int, FakeSlot] = {}
        self.step = 0
        self.epoch = -1
        self.max_chunk_tokens = 0
        self.runs = 0  # decode rows that might gain several ids
        self.failing: set[int] = set()  # seeds whose logits are not finite
        self.masks = True  # stop ids, before a row's minimum length
        self._holders = np.zeros(facts.num_pages, np.int32)
        self._older_holders = self._holders.copy()
        self._content = np.zeros((facts.num_pages, facts.page_size), np.int64)
        self._window_content = np.zeros((facts.window_pages, facts.page_size), np.int64)
        self._window_holders: Counter[int] = Counter()  # rows of earlier plans that see something in a page
        self._decode: list[int] = []

    def reset(self, message: Reset) -> None:
        self.epoch, self.step = message.epoch, 0

    def run(self, plan: StepPlan) -> None:
        """Apply a plan; its result waits in `results`."""
        assert (plan.epoch, plan.previous, plan.step) == (self.epoch, self.step, self.step + 1)
        self.step = plan.step
        for slot in column(plan.released).tolist():
            self._holders[self.slots.pop(slot).pages] -= 1
        # Rows admitted in this plan may hold pages that it computes: they read after all rows have written.
        self._older_holders = self._holders.copy()
        for row in plan.admits:
            self._admit(row)
        slots, pages = column(plan.append_slots).tolist(), column(plan.append_pages).tolist()
        groups = column(plan.append_groups, U8).tolist() or [0] * len(slots)
        for slot, page, group in zip(slots, pages, groups, strict=True):
            if group:
                windowed = self.slots[slot].windowed
                windowed[max(windowed, default=self.slots[slot].length // self.facts.page_size - 1) + 1] = page
                continue
            self.slots[slot].pages.append(page)
            self._holders[page] += 1
            self._older_holders[page] += 1
        self._count_window_holders()
        if plan.decode_slots is not None:
            self._decode = column(plan.decode_slots).tolist()
        for slot, position in column(plan.rewinds).reshape(-1, 2).tolist():
            assert slot in self._decode, "rewinds a row that does not decode"
            assert position < self.slots[slot].length
            self.slots[slot].length = position
        assert len(set(self._decode)) == len(self._decode)
        limits = column(plan.limits).tolist() or [1] * len(self._decode)
        assert len(limits) == len(self._decode)
        assert all(1 <= limit <= self.facts.max_step_ids for limit in limits)
        self.runs += sum(limit > 1 for limit in limits)
        chunks = column(plan.chunks).reshape(-1, 3).tolist()
        assert sum(limits) + sum(count for _, count, _ in chunks) <= self.facts.max_num_batched_tokens
        self.max_chunk_tokens = max(self.max_chunk_tokens, sum(count for _, count, _ in chunks))
        rows = [(slot, limit, 1) for slot, limit in zip(self._decode, limits, strict=True)]
        rows += [(slot, count, sample) for slot, count, sample in chunks]
        for place, (slot, count, _) in enumerate(rows):
            if place < len(limits) and count > 1:
                self._guess(self.slots[slot], count)
            self._write(self.slots[slot], count)
        for state in self.slots.values():
            state.fresh = False
        ids, counts, statuses = [], [], []
        for place, (slot, count, sample) in enumerate(rows):
            state = self.slots[slot]
            self._read(state, count)
            if sample:
                gained = self._verify(state, count) if place < len(limits) and count > 1 else [self._sample(state)]
                ids += gained
                counts.append(len(gained))
                statuses.append(int(state.seed in self.failing))
        self.results.append(
            StepResult(
                epoch=self.epoch,
                step=plan.step,
                ids=i32(*ids),
                counts=i32(*counts) if plan.limits else b"",
                statuses=np.array(statuses, U8).tobytes() if any(statuses) else b"",
                logprobs=(),
                device_ns=MS,
                idle_ns=0,
            )
        )

    def _admit(self, row: AdmitRow) -> None:
        assert row.slot not in self.slots
        known, pages = column(row.ids).tolist(), column(row.pages).tolist()
        assert 0 <= row.start < len(known)
        assert len(known) <= len(pages) * self.facts.page_size or not self.facts.num_pages
        windowed = column(row.window_pages).tolist()
        hits = row.start // self.facts.page_size
        assert len(windowed) == (hits - self._first_seen(row.start) if self.facts.window else 0)
        assert row.start % self.facts.page_size == 0
        state = FakeSlot(
            ids=known,
            digests=np.zeros(self.facts.max_model_len + 1, np.int64),
            pages=pages,
            windowed=dict(zip(range(hits - len(windowed), hits), windowed, strict=True)),
            length=row.start,
            seed=row.sampling.seed,
            min_len=row.min_len,
            stop_ids=set(column(row.stop_ids).tolist()),
            salt=self.salts.get(row.sampling.seed, ""),
        )
        for position in range(len(known)):
            self._digest(state, position)
        self._holders[pages] += 1
        self.slots[row.slot] = state

    def _first_seen(self, position: int) -> int:
        """Number of the first page that the id at this position sees behind its window."""
        return max((position - self.facts.window + 1) // self.facts.page_size, 0)

    def _count_window_holders(self) -> None:
        self._window_holders.clear()
        for state in self.slots.values():
            # A row that may have gained less than its table says keeps what its last known id sees.
            first = self._first_seen(min(state.length, len(state.ids) - 1))
            for number in [n for n in state.windowed if n < first]:
                del state.windowed[number]
            if not state.fresh:
                self._window_holders.update(state.windowed.values())

    def _digest(self, state: FakeSlot, position: int) -> None:
        before = int(state.digests[position - 1]) if position else hash(("salt", state.salt)) & _MASK
        state.digests[position] = hash((before, state.ids[position])) & _MASK

    def _write(self, state: FakeSlot, count: int) -> None:
        size = self.facts.page_size
        for position in range(state.length, state.length + count):
            assert position < len(state.ids), "computes an id that nobody knows"
            if self.facts.num_pages:
                page = state.pages[position // size]
                others = self._older_holders[page] - (not state.fresh)
                assert not others, f"writes page {page}, which {others} other rows hold"
                self._content[page, position % size] = state.digests[position]
            if self.facts.window:
                page = state.windowed[position // size]
                others = self._window_holders[page] - (not state.fresh)
                assert not others, f"writes windowed page {page}, which {others} other rows see"
                self._window_content[page, position % size] = state.digests[position]
        state.length += count

    def _read(self, state: FakeSlot, count: int) -> None:
        size = self.facts.page_size
        if count == 1 and state.length % size > 1:
            return  # a decode inside a page: read again when the page is full
        used = -(-state.length // size)
        if self.facts.num_pages:
            content = self._content[state.pages[:used]].ravel()[: state.length]
            assert np.array_equal(content, state.digests[: state.length]), "reads a page of another prefix"
        if self.facts.window:
            first = self._first_seen(state.length - count)
            pages = [state.windowed[number] for number in range(first, used)]
            content = self._window_content[pages].ravel()[: state.length - first * size]
            wanted = state.digests[first * size : state.length]
            assert np.array_equal(content, wanted), "reads a windowed page of another prefix"

    def _sample(self, state: FakeSlot) -> int:
        assert state.length == len(state.ids), "samples before all known ids are computed"
        return self._append_token(state)

    def _append_token(self, state: FakeSlot) -> int:
        position = len(state.ids)
        token = token_at(
            state.seed, position, self.facts.vocab_size, state.stop_ids, state.min_len if self.masks else 0
        )
        state.ids.append(token)
        self._digest(state, position)
        return token

    def _guess(self, state: FakeSlot, limit: int) -> None:
        """Append guesses behind the newest id, of which as many are right as the row will gain ids by them."""
        known = len(state.ids)
        assert state.length == known - 1, "decodes a row whose place is not known"
        state.gain = gain_at(state.seed, known, self.step, limit)
        for number in range(1, limit):
            if number < state.gain:
                self._append_token(state)
            else:
                state.ids.append(-number)
                self._digest(state, len(state.ids) - 1)

    def _verify(self, state: FakeSlot, limit: int) -> list[int]:
        """Drop the wrong guesses; returns the ids gained. K/V of the wrong ones stay where they are."""
        known = state.length - limit + 1
        del state.ids[known + max(state.gain - 1, 0) :]
        if state.gain:
            self._append_token(state)
        return state.ids[known:]


# ------------------------------------------------------------------ a caller


@dataclass
class Received:
    """What reached the detokenizer and the server of one (rid, attempt)."""

    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    opened: int = 0
    finish: Finish = Finish.NONE
    matched: int = -1
    matched_eos: bool = False
    reject: Reject | None = None
    closed: int = 0
    cached_tokens: int = -1
    first_at: int = 0
    ended_at: int = 0

    @property
    def ended(self) -> bool:
        return self.finish is not Finish.NONE or self.reject is not None


class Ring:
    """A scheduler, a fake worker, and the record of all that came out, one step at a time."""

    def __init__(self, options: SchedulerOptions | None = None, facts: WorkerFacts | None = None) -> None:
        self.facts = facts or make_facts()
        self.options = options or make_scheduler_options()
        self.scheduler = Scheduler(self.options, self.facts, EPOCH)
        self.worker = FakeWorker(self.facts)
        self.worker.reset(self.scheduler.reset)
        self.now = 1
        self.received: dict[tuple[int, int], Received] = {}
        self.others: list[Outgoing] = []
        self.plans: list[StepPlan] = []
        self.keep_plans = False

    def send(self, message: Message) -> None:
        if isinstance(message, Admit):
            self.worker.salts[message.sampling.seed] = message.cache_salt
        self.scheduler.on_message(message, self.now)

    def plan(self) -> bool:
        """Plan and run one step; False when there is none."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return False
        if self.keep_plans:
            self.plans.append(plan)
        self.worker.run(plan)
        return True

    def result(self) -> bool:
        """Deliver the oldest result; False when none waits."""
        if not self.worker.results:
            return False
        self.now += MS
        self.send(self.worker.results.popleft())
        return True

    def collect(self) -> None:
        """Take what the scheduler sends on."""
        for to, message in self.scheduler.outgoing():
            if isinstance(message, Emit):
                self._take(message)
            elif isinstance(message, Reject):
                record = self._of(message.rid, message.attempt)
                assert not record.ended, "two ends"
                record.reject = message
                record.ended_at = self.now
            else:
                self.others.append(Outgoing(to, message))

    def turn(self) -> bool:
        """Fill the pipeline, then deliver one result. False when nothing is left to do."""
        while self.plan():
            pass
        worked = self.result()
        self.collect()
        return worked

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.turn():
                break
        else:
            raise AssertionError("the scheduler does not come to rest")
        assert not self.scheduler.counters()["running"]
        assert not self.scheduler.counters()["waiting"], "requests wait and nothing runs"
        # Releases of the last plan's rows travel with the next one.
        self.scheduler._cache.check_empty()

    def _of(self, rid: int, attempt: int) -> Received:
        return self.received.setdefault((rid, attempt), Received())

    def _take(self, emit: Emit) -> None:
        rids, attempts = column(emit.rids, U64).tolist(), column(emit.attempts, U32).tolist()
        counts = column(emit.counts).tolist() or [1] * len(rids)
        finishes = column(emit.finishes, U8).tolist() or [0] * len(rids)
        matched = column(emit.matched).tolist() or [-1] * len(rids)
        matched_eos = column(emit.matched_eos, U8).tolist() or [0] * len(rids)
        ids = column(emit.ids).tolist()
        starts = column(emit.starts).tolist()
        assert len(ids) == sum(counts)
        assert len({len(rids), len(attempts), len(counts), len(finishes), len(matched), len(starts)}) == 1
        for row, opening, timing in emit.openings:
            record = self._of(rids[row], attempts[row])
            assert opening == f"opening {rids[row]} {attempts[row]}".encode()
            assert not record.opened, "opened twice"
            record.opened += 1
            record.cached_tokens = timing.cached_tokens
            record.first_at = self.now
        at = 0
        for row, (rid, attempt) in enumerate(zip(rids, attempts, strict=True)):
            record = self._of(rid, attempt)
            assert record.opened, "a row before its opening"
            assert not record.ended, "a row after its end"
            assert not record.closed, "a row after its close"
            record.ids += ids[at : at + counts[row]]
            record.starts.append(starts[row])
            at += counts[row]
            record.finish = Finish(finishes[row])
            record.matched, record.matched_eos = matched[row], bool(matched_eos[row])
            if record.ended:
                record.ended_at = self.now
        closed = zip(column(emit.closed_rids, U64).tolist(), column(emit.closed_attempts, U32).tolist(), strict=True)
        for rid, attempt in closed:
            record = self._of(rid, attempt)
            assert record.opened
            assert record.finish is Finish.NONE
            assert not record.closed
            record.closed += 1


def expected_output(admit: Admit, vocab: int) -> tuple[list[int], Finish, int]:
    """Output ids (after resumed ones), finish and matched id of a request that runs undisturbed."""
    prompt_len = len(admit.prompt_ids) // 4
    resumed = len(admit.output_ids) // 4
    stops = set(column(admit.stop_ids).tolist())
    out: list[int] = []
    while resumed + len(out) < admit.max_new_tokens:
        position = prompt_len + resumed + len(out)
        min_len = prompt_len + admit.min_new_tokens
        token = token_at(admit.sampling.seed, position, vocab, stops, min_len)
        out.append(token)
        if token in stops and position >= min_len:
            return out, Finish.STOP, token
    return out, Finish.LENGTH, -1


def ring_of(**options: object) -> Ring:
    return Ring(make_scheduler_options(**options))
