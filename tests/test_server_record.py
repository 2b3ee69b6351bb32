"""The record: what reaches a caller, whatever the ring sends in whatever order."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proto.ids import StageKind
from proto.messages import (
    U32,
    U64,
    Abort,
    Accepted,
    Census,
    CensusReply,
    Delta,
    Deltas,
    Finish,
    Outgoing,
    Reject,
    RejectCode,
    Submit,
    column,
)
from quintet_client.v1 import inference_pb2 as pb
from server.errors import (
    CallError,
    DuplicateIdError,
    InvalidFieldError,
    OverloadedError,
    SlowReaderError,
    UnavailableError,
)
from server.generation import Generation
from server.limits import MAX_STALL_SECONDS, ModelFacts
from server.record import Record
from server.validate import Ask, check_generate
from tests.builders import i32
from tests.server_ring import TOKENIZER, WORKER, make_delta, make_options

FACTS = ModelFacts(worker=WORKER, tokenizer=TOKENIZER)


def make_ask(request_id: str = "") -> Ask:
    request = pb.GenerateRequest(text="hi", logprobs=1)
    if request_id:
        request.request_id = request_id
    return check_generate(request, FACTS, ("tiny",), deadline=0)


def make_record(**options: int) -> Record:
    return Record(3, 5, make_options(**options))


def begin(record: Record, request_id: str = "") -> tuple[Generation, Submit]:
    generation, out = record.open_generation(make_ask(request_id), 100, arrival=1, now=2.0)
    assert isinstance(out.message, Submit)
    return generation, out.message


def aborted(out: list[Outgoing]) -> list[int]:
    assert all(message.to.kind is StageKind.SCHEDULER for message in out)
    aborts = [message.message for message in out if isinstance(message.message, Abort)]
    return [rid for abort in aborts for rid in column(abort.rids, U64).tolist()]


def read_all(generation: Generation) -> tuple[str, list[int], CallError | None]:
    """Everything that can be taken, and the error after it."""
    text, ids = "", b""
    try:
        while (piece := generation.take_piece()) is not None:
            text += piece.text
            ids += piece.ids
            assert piece.logprobs is None or len(piece.logprobs.chosen) == len(piece.ids) // 4
            if piece.ending is not None:
                return text, column(ids).tolist(), None
    except CallError as error:
        return text, column(ids).tolist(), error
    return text, column(ids).tolist(), None


TEXT = "abcdefgh"


@st.composite
def cut_deltas(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Where the output is cut into deltas, as (start, end)."""
    cuts = sorted(draw(st.sets(st.integers(1, len(TEXT) - 1))))
    return list(zip([0, *cuts], [*cuts, len(TEXT)], strict=True))


@settings(deadline=None)
@given(cut_deltas(), st.lists(st.integers(0, 7), max_size=12), st.data())
def test_repetitions_change_nothing(cuts: list[tuple[int, int]], again: list[int], data: st.DataObject) -> None:
    """However often earlier deltas come again, and whenever pieces are taken, the output is the same."""
    record = make_record()
    generation, submit = begin(record)
    deltas = [
        make_delta(submit, start, TEXT[start:end], finish=Finish.LENGTH if end == len(TEXT) else Finish.NONE)
        for start, end in cuts
    ]
    text = ""
    ids: list[int] = []
    for i, delta in enumerate(deltas):
        repeated = [deltas[k] for k in again if k < i]
        out = record.on_deltas(Deltas(rows=(*repeated, delta, *repeated)), now=10)
        assert out == []
        if data.draw(st.booleans()):
            piece = generation.take_piece()
            assert piece is not None
            text, ids = text + piece.text, ids + column(piece.ids).tolist()
    rest, more, error = read_all(generation)
    assert (text + rest, ids + more, error) == (TEXT, [ord(c) % 100 for c in TEXT], None)
    assert generation.ending is not None
    assert generation.ending.finish is Finish.LENGTH


@settings(deadline=None)
@given(cut_deltas(), st.data())
def test_a_hole_ends_with_unavailable_after_what_came_before(cuts: list[tuple[int, int]], data: st.DataObject) -> None:
    record = make_record()
    generation, submit = begin(record)
    lost = data.draw(st.integers(0, max(0, len(cuts) - 2)))
    rows = [make_delta(submit, start, TEXT[start:end]) for start, end in cuts]
    out = record.on_deltas(Deltas(rows=(*rows[:lost], *rows[lost + 1 :])), now=10)
    text, _, error = read_all(generation)
    assert text == TEXT[: cuts[lost][0]]
    if len(cuts) == 1:
        assert (out, error) == ([], None)  # nothing came after the lost one, so nobody can know
    else:
        assert isinstance(error, UnavailableError)
        assert aborted(out) == [submit.rid]
    assert aborted(record.close_generation(generation)) == ([submit.rid] if len(cuts) == 1 else [])


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(5)))
def test_any_order_gives_a_prefix_and_at_most_one_end(order: list[int]) -> None:
    record = make_record()
    generation, submit = begin(record)
    rows = [make_delta(submit, i, TEXT[i], finish=Finish.STOP if i == 4 else Finish.NONE) for i in range(5)]
    notes: list[bool] = []
    generation.attach(lambda: notes.append(generation.over))
    for i in order:
        record.on_deltas(Deltas(rows=(rows[i],)), now=10)
    text, _, error = read_all(generation)
    assert TEXT[:5].startswith(text)
    assert notes.count(True) <= 1
    assert (text == TEXT[:5] and error is None) == (order == sorted(order))


def test_text_without_ids_is_taken_once() -> None:
    """Held-back text may come with no new id, so its place is told by the characters alone."""
    record = make_record()
    generation, submit = begin(record)
    held = make_delta(submit, 0, "a", text="", text_start=0)
    flushed = make_delta(submit, 1, "", text="a", text_start=0, timing=None)
    record.on_deltas(Deltas(rows=(held, flushed, flushed)), now=10)
    assert read_all(generation)[0] == "a"
    late = make_delta(submit, 1, "", text="c", text_start=2)
    record.on_deltas(Deltas(rows=(late,)), now=10)
    assert isinstance(generation.error, UnavailableError)


def test_other_attempts_and_strangers_are_dropped() -> None:
    record = make_record()
    generation, submit = begin(record)
    rows = (
        make_delta(submit, 0, "x", attempt=0),
        make_delta(submit, 0, "x", attempt=2),
        make_delta(submit, 0, "x", rid=submit.rid + 1),
    )
    assert record.on_deltas(Deltas(rows=rows), now=10) == []
    assert generation.take_piece() is None
    assert record.late_deltas == 3


def test_nothing_comes_after_the_end() -> None:
    record = make_record()
    generation, submit = begin(record)
    record.on_deltas(Deltas(rows=(make_delta(submit, 0, "a", finish=Finish.STOP),)), now=10)
    record.on_deltas(Deltas(rows=(make_delta(submit, 1, "b"),)), now=11)
    record.on_reject(Reject(submit.rid, 1, RejectCode.INTERNAL, "", "late", 0))
    record.on_census_reply(census_reply(submit))
    assert read_all(generation) == ("a", [97], None)
    assert generation.error is None
    assert record.close_generation(generation) == []
    assert (record.finished, record.failed, record.abandoned) == (1, 0, 0)


def test_a_stop_string_stops_the_scheduler() -> None:
    """Only the detokenizer sees it, so the scheduler goes on until it is told."""
    record = make_record(num_schedulers=2)
    generation, submit = begin(record)
    row = make_delta(submit, 0, "a", finish=Finish.STOP, matched_string="b")
    assert aborted(record.on_deltas(Deltas(rows=(row,)), now=10)) == [submit.rid] * 2
    assert generation.ending is not None
    assert generation.ending.matched_string == "b"
    assert record.close_generation(generation) == []


def test_a_fault_of_the_detokenizer_stops_the_scheduler() -> None:
    record = make_record()
    _, submit = begin(record)
    row = make_delta(submit, 0, "", finish=Finish.ERROR)
    assert aborted(record.on_deltas(Deltas(rows=(row,)), now=10)) == [submit.rid]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_leaving_early_aborts_once(steps: int) -> None:
    """Before the tokenizer took it, before the first token, and in the middle."""
    record = make_record()
    generation, submit = begin(record)
    if steps > 0:
        record.on_accepted(Accepted(rid=submit.rid, attempt=1, replica=0, prompt_tokens=4))
    if steps > 1:
        record.on_deltas(Deltas(rows=(make_delta(submit, 0, "a"),)), now=10)
    assert aborted(record.close_generation(generation)) == [submit.rid]
    assert record.close_generation(generation) == []
    assert (len(record), record.in_flight.requests, record.in_flight.bytes) == (0, 0, 0)
    assert record.abandoned == 1


def test_abort_by_client_id() -> None:
    record = make_record()
    generation, submit = begin(record, "mine")
    record.on_deltas(Deltas(rows=(make_delta(submit, 0, "a"),)), now=10)
    assert record.abort_by_client_id("other") is None
    assert aborted(record.abort_by_client_id("mine") or []) == [submit.rid]
    assert record.abort_by_client_id("mine") is None
    piece = generation.take_piece()
    assert piece is not None
    assert piece.ending is not None
    assert (piece.text, piece.ending.finish) == ("a", Finish.ABORT)


def test_live_client_ids_are_unique_and_free_again_afterwards() -> None:
    record = make_record()
    generation, _ = begin(record, "mine")
    with pytest.raises(DuplicateIdError):
        begin(record, "mine")
    assert (len(record), record.in_flight.requests) == (1, 1)
    record.close_generation(generation)
    begin(record, "mine")


def test_a_made_id_cannot_be_taken() -> None:
    record = make_record()
    generation, _ = begin(record)
    with pytest.raises(DuplicateIdError):
        begin(record, generation.client_id)


def test_rids_tell_server_and_incarnation_and_never_repeat() -> None:
    record = make_record()
    rids = {begin(record)[1].rid for _ in range(50)}
    assert len(rids) == 50
    assert {rid >> 32 for rid in rids} == {3 << 24 | 5}


def test_admission_by_requests() -> None:
    record = make_record(max_in_flight_requests=2)
    first, _ = begin(record)
    begin(record)
    with pytest.raises(OverloadedError, match="2 requests are in flight, the limit is 2") as refusal:
        begin(record)
    assert refusal.value.retry_after_ms > 0
    record.close_generation(first)
    begin(record)


def test_admission_by_bytes_lets_a_single_large_one_in() -> None:
    record = make_record(max_in_flight_bytes=3000)
    large, _ = record.open_generation(make_ask(), 5000, arrival=1, now=2.0)
    with pytest.raises(OverloadedError, match="the limit of 3000"):
        begin(record)
    record.close_generation(large)
    begin(record)
    begin(record)
    with pytest.raises(OverloadedError):
        begin(record)


def test_reject_becomes_the_error() -> None:
    record = make_record()
    generation, submit = begin(record)
    record.on_reject(Reject(submit.rid, 2, RejectCode.INVALID, "text", "of another attempt", 0))
    assert generation.error is None
    record.on_reject(Reject(submit.rid, 1, RejectCode.INVALID, "text", "600 tokens, limit 512", 0))
    error = read_all(generation)[2]
    assert isinstance(error, InvalidFieldError)
    assert (error.field, error.description) == ("text", "600 tokens, limit 512")
    assert record.close_generation(generation) == []


def census_reply(submit: Submit) -> CensusReply:
    return CensusReply(rids=submit.rid.to_bytes(8, "little"), attempts=(1).to_bytes(4, "little"))


def listed(out: Outgoing) -> list[tuple[int, int]]:
    assert isinstance(out.message, Census)
    return list(zip(column(out.message.rids, U64), column(out.message.attempts, U32), strict=True))


def test_census_lists_what_each_scheduler_may_have() -> None:
    record = make_record(num_schedulers=2)
    _, underway = begin(record)
    _, accepted = begin(record)
    _, over = begin(record)
    record.on_accepted(Accepted(rid=accepted.rid, attempt=1, replica=1, prompt_tokens=4))
    record.on_deltas(Deltas(rows=(make_delta(over, 0, "a", finish=Finish.STOP),)), now=10)
    zero, one = record.census()
    assert (zero.to.index, listed(zero)) == (0, [(underway.rid, 1)])
    assert (one.to.index, listed(one)) == (1, [(underway.rid, 1), (accepted.rid, 1)])


def test_unknown_three_times_means_lost() -> None:
    record = make_record()
    generation, submit = begin(record)
    for _ in range(5):
        record.on_census_reply(census_reply(submit))
    assert generation.error is None  # it may not have reached the scheduler yet
    record.on_accepted(Accepted(rid=submit.rid, attempt=1, replica=0, prompt_tokens=4))
    record.on_census_reply(census_reply(submit))
    record.on_census_reply(census_reply(submit))
    record.on_deltas(Deltas(rows=(make_delta(submit, 0, "a"),)), now=10)
    record.on_census_reply(census_reply(submit))
    record.on_census_reply(census_reply(submit))
    assert generation.error is None  # its last delta was still on its way
    record.on_census_reply(census_reply(submit))
    assert isinstance(generation.error, UnavailableError)


def test_fail_all_ends_each_once() -> None:
    record = make_record()
    one, first = begin(record)
    two, second = begin(record)
    record.on_deltas(Deltas(rows=(make_delta(first, 0, "a", finish=Finish.STOP),)), now=10)
    assert aborted(record.fail_all(UnavailableError("gone"))) == [second.rid]
    assert (one.error, str(two.error)) == (None, "gone")
    assert record.fail_all(UnavailableError("again")) == []


def test_a_client_that_does_not_read_is_cut_off() -> None:
    record = make_record()
    generation, submit = begin(record)
    cuts: list[bool] = []
    generation.limit_buffer(500, lambda: cuts.append(True))
    row = make_delta(submit, 0, "abcdefgh", logprobs=None)
    assert record.on_deltas(Deltas(rows=(row,)), now=10) == []  # 8 characters, 8 ids of 4 bytes, 320 for the objects
    row = make_delta(submit, 8, "abcdefgh", logprobs=None)
    assert aborted(record.on_deltas(Deltas(rows=(row,)), now=10)) == [submit.rid]
    assert cuts == [True]
    text, _, error = read_all(generation)
    assert text == ""
    assert isinstance(error, SlowReaderError)
    assert "limit is 500" in str(error)


def test_a_client_that_takes_nothing_is_cut_off_in_time() -> None:
    record = make_record()
    (stalled, submit), (reading, other) = begin(record), begin(record)
    for row in (submit, other):
        record.on_deltas(Deltas(rows=(make_delta(row, 0, "a"),)), now=10)
    stalled.writing_since, at_last = 10, 10 + MAX_STALL_SECONDS * 10**9 + 1
    assert record.cut_stalled(at_last - 1) == []
    assert aborted(record.cut_stalled(at_last)) == [submit.rid]
    assert isinstance(stalled.error, SlowReaderError)
    assert reading.error is None
    assert record.cut_stalled(at_last) == []  # it has ended
    reading.begin_write(10)
    record.on_deltas(Deltas(rows=(make_delta(other, 1, "b", finish=Finish.STOP),)), now=20)
    assert record.cut_stalled(at_last) == []  # it has all that there is


def test_times_and_counts() -> None:
    record = make_record()
    generation, submit = begin(record)
    record.on_deltas(Deltas(rows=(make_delta(submit, 0, "ab"),)), now=1_000)
    record.on_deltas(Deltas(rows=(make_delta(submit, 2, "c"),)), now=5_000)
    assert (generation.first_at, generation.last_at, generation.ids_received) == (1_000, 5_000, 3)
    assert (generation.cached_tokens, generation.queue, generation.prefill) == (1, 2_000_000, 3_000_000)


def test_joined_logprobs_stay_parallel() -> None:
    record = make_record()
    generation, submit = begin(record)
    deltas: list[Delta] = [make_delta(submit, 0, "ab"), make_delta(submit, 2, "c")]
    deltas.append(make_delta(submit, 3, "", finish=Finish.LENGTH, logprobs=None))
    record.on_deltas(Deltas(rows=tuple(deltas)), now=1)
    piece = generation.take_piece()
    assert piece is not None
    assert piece.logprobs is not None
    assert piece.ids == i32(*(ord(c) % 100 for c in "abc"))
    assert [len(part) for part in msgspec.structs.astuple(piece.logprobs)] == [3, 3, 3]


class RecordMachine(RuleBasedStateMachine):
    """Any events in any order: one end for each generation, and nothing left in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.record = make_record(max_in_flight_requests=4, num_schedulers=2)
        self.live: list[tuple[Generation, Submit]] = []
        self.ends: dict[int, list[object]] = {}
        self.texts: dict[int, str] = {}
        self.stopped: set[int] = set()

    def pick(self, data: st.DataObject) -> tuple[Generation, Submit]:
        return data.draw(st.sampled_from(self.live))

    @rule(named=st.booleans())
    def open(self, named: bool) -> None:
        expected: type[CallError] | None = None
        if named and any(generation.client_id == "name" for generation, _ in self.live):
            expected = DuplicateIdError
        elif len(self.live) >= 4:
            expected = OverloadedError
        if expected is not None:
            with pytest.raises(expected):
                begin(self.record, "name" if named else "")
            return
        generation, submit = begin(self.record, "name" if named else "")
        generation.limit_buffer(2000, lambda: None)
        self.live.append((generation, submit))
        self.ends[submit.rid], self.texts[submit.rid] = [], ""

    @precondition(lambda self: self.live)
    @rule(data=st.data(), offset=st.integers(-2, 1), attempt=st.sampled_from([1, 1, 1, 2]), end=st.booleans())
    def delta(self, data: st.DataObject, offset: int, attempt: int, end: bool) -> None:
        generation, submit = self.pick(data)
        start = max(0, generation.ids_received + offset)
        row = make_delta(submit, start, "ab", attempt=attempt, finish=Finish.STOP if end else Finish.NONE)
        self.stopped |= set(aborted(self.record.on_deltas(Deltas(rows=(row,)), now=1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), kind=st.sampled_from(["accept", "reject", "unknown", "abort", "fail"]))
    def event(self, data: st.DataObject, kind: str) -> None:
        generation, submit = self.pick(data)
        match kind:
            case "accept":
                self.record.on_accepted(Accepted(rid=submit.rid, attempt=1, replica=1, prompt_tokens=4))
            case "reject":
                self.record.on_reject(Reject(submit.rid, 1, RejectCode.DEADLINE, "", "late", 0))
            case "unknown":
                self.record.on_census_reply(census_reply(submit))
            case "abort":
                self.stopped |= set(aborted(self.record.abort_by_client_id(generation.client_id) or []))
            case "fail":
                self.stopped |= set(aborted(self.record.fail_all(UnavailableError("gone"))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        generation, submit = self.pick(data)
        if self.ends[submit.rid]:
            return  # its handler has left this loop
        try:
            piece = generation.take_piece()
        except CallError as error:
            self.ends[submit.rid].append(error)
            return
        if piece is not None:
            self.texts[submit.rid] += piece.text
            assert ("ab" * 1000).startswith(self.texts[submit.rid])
            if piece.ending is not None:
                self.ends[submit.rid].append(piece.ending)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        generation, submit = self.pick(data)
        over = generation.over
        out = aborted(self.record.close_generation(generation))
        assert set(out) == (set() if over else {submit.rid})
        self.live.remove((generation, submit))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.record) == self.record.in_flight.requests == len(self.live)
        assert (self.record.in_flight.bytes == 0) == (not self.live)
        assert all(not (generation.ending and generation.error) for generation, _ in self.live)
        assert all(len(ends) <= 1 for ends in self.ends.values())
        listed_rids = {rid for out in self.record.census() for rid, _ in listed(out)}
        assert listed_rids == {submit.rid for generation, submit in self.live if not generation.over}


RecordMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRecordMachine = RecordMachine.TestCase
