"""Rows that may gain several ids in a step: the scheduler's plans, and the ring with the simulated device."""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from detokenizer_proc.detokenizer import Detokenizer
from detokenizer_proc.vocabulary import Vocabulary, read_vocabulary
from proto.channel import encode
from proto.ids import StageKind
from proto.messages import (
    U64,
    Admit,
    Deltas,
    Emit,
    Finish,
    Opening,
    Sampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    column,
)
from proto.model import ModelConfig
from scheduler.core import Scheduler
from scheduler.results import WorkerError
from tests.builders import (
    i32,
    make_facts,
    make_model,
    make_scheduler_options,
    make_stage,
    make_worker_options,
    make_world,
)
from tests.scheduler_fakes import Ring, expected_output, make_abort, make_admit, rid_of
from tests.tiny_tokenizers import byte_level
from worker.sim.device import SimulatedDevice

# --------------------------------------------------------------------------- the scheduler's plans


def speculative_ring(depth: int = 3, step_ids: int = 5, **facts: object) -> Ring:
    ring = Ring(make_scheduler_options(pipeline_depth=depth), make_facts(max_step_ids=step_ids, **facts))
    ring.keep_plans = True
    return ring


def decoding(plans: list[StepPlan]) -> list[list[int]]:
    """Slots that each plan decodes."""
    found: list[list[int]] = []
    for plan in plans:
        found.append(found[-1] if plan.decode_slots is None else column(plan.decode_slots).tolist())
    return found


def check_outputs(ring: Ring, admits: list[Admit]) -> None:
    for admit in admits:
        got, (ids, finish, matched) = ring.received[admit.rid, 1], expected_output(admit, ring.facts.vocab_size)
        assert (got.ids, got.finish, got.matched) == (ids, finish, matched)


def test_a_row_is_planned_again_when_its_result_has_come() -> None:
    ring = speculative_ring()
    admits = [make_admit(rid_of(n), [n] * 9, 40, stop_ids=[7 * n]) for n in range(1, 5)]
    for admit in admits:
        ring.send(admit)
    in_flight: deque[set[int]] = deque()
    while True:
        while ring.plan():
            rows = set(decoding(ring.plans)[-1])
            assert not any(rows & other for other in in_flight), "planned before its last result"
            in_flight.append(rows)
        if not ring.result():
            break
        in_flight.popleft()
        ring.collect()
    ring.drain()
    check_outputs(ring, admits)
    assert ring.worker.runs > 20


def test_speculative_rows_run_together() -> None:
    """Two that began at odd and even steps do not take turns from then on."""
    ring = speculative_ring(depth=2)
    ring.send(make_admit(rid_of(1), [1], 100))
    ring.turn()
    ring.send(make_admit(rid_of(2), [2], 100))
    for _ in range(6):
        ring.turn()
    assert set(map(tuple, decoding(ring.plans)[-4:])) == {(0, 1)}


def test_plans_say_a_rows_place_only_where_it_gained_less_than_its_limit() -> None:
    ring = speculative_ring(depth=1)
    ring.send(make_admit(rid_of(1), [5, 6, 7], 60))
    limit, told = 1, 0
    for _ in range(12):
        assert ring.plan()
        plan = ring.plans[-1]
        result = ring.worker.results[0]
        if plan.limits:
            assert bool(plan.rewinds) == bool(told)
            (limit,) = column(plan.limits).tolist()
            (gained,) = column(result.counts).tolist()
            told = limit - gained
        ring.result()
        ring.collect()
    assert limit == 5


def test_limits_end_with_the_row_and_leave_half_of_a_step_to_prefills() -> None:
    options = make_scheduler_options(max_num_batched_tokens=24, max_num_seqs=4)
    ring = Ring(options, make_facts(max_step_ids=50, num_pages=200))
    ring.keep_plans = True
    admits = [make_admit(rid_of(n), [n] * 40, 25) for n in range(1, 4)]
    for admit in admits:
        ring.send(admit)
    ring.drain()
    check_outputs(ring, admits)
    limits = [column(plan.limits) for plan in ring.plans if plan.limits]
    assert max(int(row.sum()) for row in limits) <= 12
    assert max(int(row.max()) for row in limits) == 12


def test_speculation_preempts_nobody() -> None:
    """Two rows whose last pages are just there: pages for guesses are not."""
    ring = speculative_ring(depth=2, step_ids=8, num_pages=14, max_model_len=56)
    admits = [make_admit(rid_of(n), [n] * 10, 18) for n in (1, 2)]
    for admit in admits:
        ring.send(admit)
    ring.drain()
    check_outputs(ring, admits)
    assert ring.scheduler.counters()["preemptions"] == 0


def test_nothing_changes_where_no_row_may_gain_more_than_one() -> None:
    ring = speculative_ring(step_ids=1)
    ring.send(make_admit(rid_of(1), [5, 6, 7], 60))
    ring.drain()
    assert not any(plan.limits or plan.rewinds for plan in ring.plans)
    assert len(ring.plans) == 60


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    ring = speculative_ring()
    admits = [make_admit(rid_of(n), [n] * 9, 30, seed=n) for n in range(1, 5)]
    ring.worker.failing.add(2)
    for admit in admits:
        ring.send(admit)
    ring.drain()
    reject = ring.received[rid_of(2), 1].reject
    assert reject is not None
    assert "not finite" in reject.message
    check_outputs(ring, [admits[0], *admits[2:]])


def test_runs_reach_the_detokenizer_of_their_request() -> None:
    ring = speculative_ring()
    ring.send(make_world(*(make_stage(StageKind.DETOKENIZER, n, 1) for n in range(3))))
    admits = [make_admit(rid_of(n), [n] * 9, 30, stop_ids=[7 * n, 5]) for n in range(1, 8)]
    for admit in admits:
        ring.send(admit)
    places: set[tuple[int, int]] = set()
    while ring.plan() or ring.worker.results:
        ring.result()
        for to, message in ring.scheduler.outgoing():
            assert isinstance(message, Emit)
            ring._take(message)
            places |= {(rid % 3, to.index) for rid in column(message.rids, U64).tolist()}
    assert places == {(0, 0), (1, 1), (2, 2)}
    check_outputs(ring, admits)


@pytest.mark.parametrize(
    ("counts", "ids", "text"),
    [
        ([6], 6, "row 0 has 6 ids; its limit is 5"),
        ([-1], 0, "has 0 ids in 1 rows"),
        ([2, 1], 3, "sampled 1 rows; its result has 3 ids in 2 rows"),
        ([2], 3, "sampled 1 rows; its result has 3 ids in 1 rows"),
    ],
)
def test_counts_that_do_not_fit_the_plan_are_refused(counts: list[int], ids: int, text: str) -> None:
    ring = speculative_ring(depth=1)
    ring.send(make_admit(rid_of(1), [5, 6, 7], 60))
    ring.turn()
    assert ring.plan()
    result = msgspec.structs.replace(ring.worker.results.popleft(), ids=bytes(4 * ids), counts=i32(*counts))
    with pytest.raises(WorkerError, match=text):
        ring.send(result)


def test_a_plain_row_gains_exactly_one() -> None:
    ring = speculative_ring(step_ids=1, depth=1)
    ring.send(make_admit(rid_of(1), [5, 6, 7], 60))
    assert ring.plan()
    result = msgspec.structs.replace(ring.worker.results.popleft(), ids=b"", counts=bytes(4))
    with pytest.raises(WorkerError, match="row 0 has 0 ids; its limit is 1"):
        ring.send(result)


# --------------------------------------------------------------------------- the ring

STEP_NS = 1_000_000
TEXT_MODEL = make_model(vocab_size=600, max_position_embeddings=200, num_layers=2)


@dataclass
class Heard:
    """What the server has of one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    chosen: list[float] = field(default_factory=list)
    top_ids: list[bytes] = field(default_factory=list)
    finish: Finish = Finish.NONE
    matched: tuple[int, str] = (-1, "")


@dataclass(frozen=True)
class Wish:
    """One request, and when its caller leaves."""

    admit: Admit
    opening: Opening
    leaves_after: int  # ids; 0 = stays


def wishes(seed: int, count: int = 24) -> list[Wish]:
    dice, found = random.Random(seed), []
    for number in range(1, count + 1):
        rid = rid_of(number)
        prompt = [dice.randrange(3, 600) for _ in range(dice.choice([1, 9, 30, 70]))]
        logprobs = dice.choice([-1, -1, 0, 2])
        sampling = Sampling(temperature=1.0, seed=dice.randrange(1 << 63), logprobs=logprobs)
        stops = tuple(dice.choice(["e", "a", "0"]) for _ in range(dice.choice([0, 0, 1])))
        admit = make_admit(
            rid,
            prompt,
            dice.choice([1, 2, 7, 40, 90]),
            stop_ids=[*dice.sample(range(600), 6), 2],
            min_new=dice.choice([0, 0, 1]),
        )
        opening = Opening(
            rid=rid,
            attempt=1,
            prompt_tokens=len(prompt),
            prompt_tail=i32(*prompt[-16:]),
            stop_strings=stops,
            logprobs=logprobs,
        )
        admit = msgspec.structs.replace(admit, sampling=sampling, opening=encode(opening), arrival=0)
        found.append(Wish(admit, opening, dice.choice([0, 0, 0, 5])))
    return found


class TextRing:
    """Scheduler, simulated device, detokenizer and a caller, on one clock."""

    def __init__(
        self, vocabulary: Vocabulary, model: ModelConfig, depth: int, step_ids: int, preempt_every: int = 0
    ) -> None:
        self.now = 1
        options = make_worker_options(
            model,
            device=f"sim:h200,eos=0.01,max_step_ids={step_ids}",
            num_pages=90,
            max_num_seqs=8,
            max_num_batched_tokens=48,
        )
        self.device = SimulatedDevice(options, clock_ns=lambda: self.now)
        self.scheduler = Scheduler(
            make_scheduler_options(pipeline_depth=depth, max_num_batched_tokens=48, debug_preempt_every=preempt_every),
            self.device.facts,
            epoch=1,
        )
        self.device.reset(1)
        self.detokenizer = Detokenizer(vocabulary)
        self.heard: dict[int, Heard] = {}
        self.longest_run = 0
        self._leaves: dict[int, int] = {}
        self._results: list[tuple[int, int, StepResult]] = []

    def play(self, requests: list[Wish]) -> dict[int, Heard]:
        """Send a request a step until all have ended."""
        waiting = deque(requests)
        while True:
            if waiting:
                wish = waiting.popleft()
                self.heard[wish.admit.rid] = Heard()
                self._leaves[wish.admit.rid] = wish.leaves_after
                self.scheduler.on_message(wish.admit, self.now)
            while (due := self.scheduler.plan_due()) is not None:
                self.now = max(self.now, due)
                plan = self.scheduler.plan(self.now)
                if plan is None:
                    break
                completion = self.device.launch(plan)
                assert completion is not None
                assert isinstance(completion.message, StepResult)
                heapq.heappush(self._results, (completion.due, plan.step, completion.message))
            if self._results:
                due, _, result = heapq.heappop(self._results)
                self.now = max(self.now + STEP_NS, due)
                self.scheduler.on_message(result, self.now)
            elif not waiting:
                break
            self._tell()
        counters = self.scheduler.counters()
        assert (counters["running"], counters["waiting"]) == (0, 0)
        assert counters["pages_free"] + counters["pages_cached"] == counters["pages_total"]
        return self.heard

    def _tell(self) -> None:
        for _, message in self.scheduler.outgoing():
            assert isinstance(message, Emit), message
            for _, deltas in self.detokenizer.on_emit(message):
                assert isinstance(deltas, Deltas)
                self._hear(deltas)

    def _hear(self, deltas: Deltas) -> None:
        for delta in deltas.rows:
            heard, ids = self.heard[delta.rid], column(delta.ids).tolist()
            if heard.finish:
                continue
            assert delta.start == len(heard.ids)
            assert delta.text_start == len(heard.text)
            self.longest_run = max(self.longest_run, len(ids))
            heard.ids += ids
            heard.text += delta.text
            logprobs = delta.logprobs or TokenLogprobs((), (), ())
            heard.chosen += logprobs.chosen
            heard.top_ids += logprobs.top_ids
            heard.finish = delta.finish
            heard.matched = delta.matched_id, delta.matched_string
            leaves = self._leaves[delta.rid]
            if delta.matched_string or (leaves and len(heard.ids) >= leaves and not delta.finish):
                heard.finish = heard.finish or Finish.ABORT
                self.scheduler.on_message(make_abort((delta.rid, 1)), self.now)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return read_vocabulary(str(byte_level(tmp_path_factory.mktemp("text") / "tokenizer.json")), 600)


def alike(heard: Heard, plain: Heard) -> bool:
    """Equal; where the caller left, one may have got more than the other, to its end even."""
    if Finish.ABORT not in (heard.finish, plain.finish):
        return heard == plain
    common = min(len(heard.ids), len(plain.ids))
    return heard.ids[:common] == plain.ids[:common]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(), (0, 20), (20, 20)], ids=["full", "mixed", "windowed"])
def test_text_is_that_of_one_id_at_a_time(vocabulary: Vocabulary, depth: int, windows: tuple[int, ...]) -> None:
    """With stops by id and by string, logprobs, callers that leave, and a preemption every fourth step."""
    model = msgspec.structs.replace(TEXT_MODEL, windows=windows)
    requests = wishes(depth + 1)
    plain = TextRing(vocabulary, model, 2, step_ids=1).play(requests)
    runs = TextRing(vocabulary, model, depth, step_ids=5, preempt_every=4)
    heard = runs.play(requests)
    for rid, other in plain.items():
        assert alike(heard[rid], other), rid
    assert runs.longest_run == 5
    assert runs.scheduler.counters()["preemptions"] > 5
    finishes = {other.finish for other in plain.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH, Finish.ABORT}
    assert any(other.matched[1] for other in plain.values())
    assert any(other.chosen for other in plain.values())
