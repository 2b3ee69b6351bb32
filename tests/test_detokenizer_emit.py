"""The detokenizer's logic, driven by Emits as a scheduler sends them."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from detokenizer_proc.detokenizer import Detokenizer
from detokenizer_proc.vocabulary import Vocabulary, read_vocabulary
from proto.channel import encode
from proto.ids import Address, StageKind, make_rid
from proto.messages import (
    Delta,
    Deltas,
    DetokenizeCall,
    DetokenizeReply,
    Emit,
    Finish,
    Opening,
    Resume,
    Timing,
    TokenLogprobs,
)
from tests.builders import i32
from tests.tiny_tokenizers import SAMPLES, byte_level

# Each letter is a token, and some words are, so that tests script text in tokens of their choice. Ids of
# bytes are themselves.
WORDS = ("ABC", "DEF", "GHI", "G", "HI", "J", "lo wo", "hello", " A", " O", " P", " Q", "<eos>")
EOS = 256 + WORDS.index("<eos>")
TIMING = Timing(3, 10, 20)
RID = make_rid(1, 1, 7)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + list(WORDS)
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("scripted") / "tokenizer.json"
    tokenizer.save(str(path))
    return read_vocabulary(str(path), 0)


def ids_of(*tokens: str) -> list[int]:
    """Words by name, anything else by its bytes."""
    return [n for t in tokens for n in ([256 + WORDS.index(t)] if t in WORDS else t.encode())]


@dataclass
class Row:
    ids: list[int]
    start: int
    rid: int = RID
    attempt: int = 0
    index: int = 0
    finish: Finish = Finish.NONE
    matched: int = -1
    eos: bool = False
    opening: Opening | None = None
    logprobs: TokenLogprobs | None = None


def emit(*rows: Row, closed: list[tuple[int, int]] | None = None) -> Emit:
    closed = closed or []
    return Emit(
        step=1,
        rids=np.array([row.rid for row in rows], "<u8").tobytes(),
        attempts=np.array([row.attempt for row in rows], "<u4").tobytes(),
        indexes=bytes(row.index for row in rows),
        starts=i32(*(row.start for row in rows)),
        counts=i32(*(len(row.ids) for row in rows)),
        ids=i32(*(number for row in rows for number in row.ids)),
        finishes=bytes(row.finish for row in rows),
        matched=i32(*(row.matched for row in rows)),
        matched_eos=bytes(row.eos for row in rows),
        openings=tuple((n, encode(row.opening), TIMING) for n, row in enumerate(rows) if row.opening is not None),
        logprobs=tuple((n, encode(row.logprobs)) for n, row in enumerate(rows) if row.logprobs is not None),
        closed_rids=np.array([rid for rid, _ in closed], "<u8").tobytes(),
        closed_attempts=np.array([attempt for _, attempt in closed], "<u4").tobytes(),
    )


def opening(
    *stops: str,
    rid: int = RID,
    attempt: int = 0,
    prompt: list[int] | None = None,
    include_stop: bool = False,
    min_new_tokens: int = 0,
    skip_special_tokens: bool = True,
    logprobs: int = -1,
    resume: Resume | None = None,
) -> Opening:
    prompt = prompt or [ord("?")]
    return Opening(
        rid,
        attempt,
        len(prompt),
        i32(*prompt[-16:]),
        stops,
        include_stop,
        min_new_tokens,
        skip_special_tokens,
        logprobs,
        resume,
    )


@dataclass
class Output:
    """One sequence as its server sees it: everything checked that must hold between deltas."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        assert not self.finish, "nothing may follow an end"
        assert delta.start == len(self.ids)
        assert delta.text_start == len(self.text)
        assert (delta.timing is None) == bool(self.deltas), "timing comes with the first delta"
        self.ids += np.frombuffer(delta.ids, "<i4").tolist()
        self.text += delta.text
        self.deltas.append(delta)

    @property
    def finish(self) -> Finish:
        return self.deltas[-1].finish if self.deltas else Finish.NONE


def by_server_of(detokenizer: Detokenizer, message: Emit) -> dict[int, list[Delta]]:
    """Deltas by the server that gets them."""
    found: dict[int, list[Delta]] = {}
    for to, deltas in detokenizer.on_emit(message):
        assert to.kind is StageKind.SERVER
        assert isinstance(deltas, Deltas)
        assert found.setdefault(to.index, list(deltas.rows)) == list(deltas.rows), "one message a server"
    return found


def one(detokenizer: Detokenizer, *rows: Row) -> list[Delta]:
    """Deltas of an Emit whose rows are all of server 1."""
    by_server = by_server_of(detokenizer, emit(*rows))
    assert set(by_server) <= {1}
    return by_server.get(1, [])


def play(
    vocabulary: Vocabulary, start: Opening, ids: list[int], cuts: list[int], finish: Finish = Finish.LENGTH
) -> Output:
    """Run one request whose ids come cut into steps; its end comes with the last of them."""
    detokenizer = Detokenizer(vocabulary)
    output = Output()
    if start.resume is not None:
        output.ids = np.frombuffer(start.resume.output_ids, "<i4").tolist()
        output.text = "." * start.resume.characters
    base = len(output.ids)
    bounds = [0, *sorted(cuts), len(ids)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        last = number == len(bounds) - 2
        row = Row(
            ids[begin:end],
            base + begin,
            finish=finish if last else Finish.NONE,
            opening=start if number == 0 else None,
        )
        for delta in one(detokenizer, row):
            output.add(delta)
    assert detokenizer.live_requests == 0
    assert detokenizer.unknown_rows == 0
    return output


def steps(vocabulary: Vocabulary, start: Opening, ids: list[int]) -> list[str]:
    """Text of each delta, one id a step."""
    return [delta.text for delta in play(vocabulary, start, ids, list(range(1, len(ids)))).deltas]


SCRIPTS = st.lists(st.sampled_from([*range(256, EOS), *b"hello \xf0\x9f\x8d\xb0\xe2\x82\xac"]), max_size=24)


@given(
    ids=SCRIPTS,
    stops=st.lists(st.sampled_from(["DE", "DEFGHIJ", "o w", "lo", "€", "\ufffd", "ll", " O P"]), max_size=3),
    include=st.booleans(),
    early=st.integers(0, 4),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_cuts_change_nothing(
    vocabulary: Vocabulary, ids: list[int], stops: list[str], include: bool, early: int, data: st.DataObject
) -> None:
    """However ids are cut into steps, joined text, ids and end are equal."""
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    start = opening(*stops, include_stop=include, min_new_tokens=early)
    whole, cut = play(vocabulary, start, ids, []), play(vocabulary, start, ids, cuts)
    assert (cut.text, cut.ids, cut.finish) == (whole.text, whole.ids, whole.finish)
    assert cut.deltas[-1].matched_string == whole.deltas[-1].matched_string
    assert bool(cut.deltas[-1].matched_string) == (cut.finish is Finish.STOP)
    if not stops:
        data_bytes = b"".join((vocabulary.visible or [])[number] for number in ids)
        assert cut.text == data_bytes.decode(errors="replace")


@given(ids=SCRIPTS, early=st.integers(0, 3), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_resume_goes_on_where_the_caller_stands(
    vocabulary: Vocabulary, ids: list[int], early: int, data: st.DataObject
) -> None:
    """Kill the detokenizer after any step: what was delivered and what follows are the undisturbed text."""
    stops = ("DEFGHIJ", "lo w", "ll", " O P")
    whole = play(vocabulary, opening(*stops, min_new_tokens=early), ids, [])
    delivered = data.draw(st.integers(0, max(len(whole.ids) - 1, 0)))
    detokenizer = Detokenizer(vocabulary)
    before = Output()
    for place in range(delivered):
        start = opening(*stops, min_new_tokens=early) if place == 0 else None
        (delta,) = one(detokenizer, Row([ids[place]], place, opening=start))
        before.add(delta)
    resume = Resume(i32(*before.ids), len(before.text))
    after = play(vocabulary, opening(*stops, min_new_tokens=early, resume=resume), ids[delivered:], [])
    assert before.text + after.text[len(before.text) :] == whole.text
    assert after.ids == whole.ids
    assert after.finish is whole.finish


def test_a_resume_gives_characters_that_the_caller_lacks(vocabulary: Vocabulary) -> None:
    resume = Resume(i32(*ids_of("ABC")), 1)
    assert play(vocabulary, opening(resume=resume), ids_of("G"), []).text == ".BCG"


def test_a_stop_string_inside_and_across_tokens(vocabulary: Vocabulary) -> None:
    output = play(vocabulary, opening("DE"), ids_of("ABC", "DEF", "GHI"), [1, 2])
    assert (output.text, output.ids, output.finish) == ("ABC", ids_of("ABC", "DEF"), Finish.STOP)
    assert output.deltas[-1].matched_string == "DE"
    assert (output.deltas[-1].matched_id, output.deltas[-1].matched_is_eos) == (-1, False)
    output = play(vocabulary, opening("CD", include_stop=True), ids_of("ABC", "DEF", "GHI"), [1, 2])
    assert (output.text, output.ids) == ("ABCD", ids_of("ABC", "DEF"))


def test_what_may_become_a_stop_string_is_held_back(vocabulary: Vocabulary) -> None:
    held = steps(vocabulary, opening("DEFGHIJ"), ids_of("DEF", "G", "HI", "J"))
    assert held == ["", "", "", ""]
    released = steps(vocabulary, opening("DEFGHIJ"), ids_of("DEF", "G", "HI", "ABC"))
    assert released == ["", "", "", "DEFGHIABC"]
    at_the_end = steps(vocabulary, opening("DEFGHIJ"), ids_of("ABC", "DEF"))
    assert at_the_end == ["ABC", "DEF"]


def test_a_stop_string_with_spaces(vocabulary: Vocabulary) -> None:
    output = play(vocabulary, opening("O P Q"), ids_of(" A", " O", " P", " Q", " A"), [])
    assert (output.text, output.finish) == (" A ", Finish.STOP)


def test_stop_strings_are_not_looked_for_in_early_tokens(vocabulary: Vocabulary) -> None:
    ids = ids_of("ABC", "DEF", *["G"] * 6, "DEF", "J")
    output = play(vocabulary, opening("DE", min_new_tokens=8), ids, [])
    assert (output.text, len(output.ids)) == ("ABCDEFGGGGGG", 9)
    assert play(vocabulary, opening("DE", min_new_tokens=9), ids, []).finish is Finish.LENGTH


def test_rows_after_a_hit_are_dropped_until_the_end(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    (delta,) = one(detokenizer, Row(ids_of("DEF"), 0, opening=opening("DE")))
    assert (delta.finish, delta.text) == (Finish.STOP, "")
    assert one(detokenizer, Row(ids_of("GHI"), 1)) == []
    assert detokenizer.live_requests == 1
    assert one(detokenizer, Row(ids_of("J"), 2, finish=Finish.LENGTH)) == []
    assert (detokenizer.live_requests, detokenizer.unknown_rows) == (0, 0)


def test_stopped_requests_that_nobody_closes_are_forgotten_in_the_end(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detokenizer_proc.detokenizer._MOST_STOPPED", 3)
    detokenizer = Detokenizer(vocabulary)
    for number in range(10):
        rid = make_rid(1, 1, number)
        one(detokenizer, Row(ids_of("DEF"), 0, rid=rid, opening=opening("DE", rid=rid)))
    assert detokenizer.live_requests == 3
    one(detokenizer, Row(ids_of("G"), 1, rid=make_rid(1, 1, 9)), Row(ids_of("G"), 1, rid=make_rid(1, 1, 0)))
    assert detokenizer.unknown_rows == 1, "the oldest is forgotten, the newest is not"


def test_closed_requests_are_forgotten_up_to_their_attempt(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    one(detokenizer, Row(ids_of("G"), 0, opening=opening()))
    # Superseded: the new attempt opens in the Emit that closes the old one.
    newer = Row(ids_of("G"), 0, attempt=1, opening=opening(attempt=1))
    assert len(by_server_of(detokenizer, emit(newer, closed=[(RID, 0)]))[1]) == 1
    assert detokenizer.live_requests == 1
    # Aborted before its first Emit left: opened and closed at once.
    other = make_rid(1, 1, 8)
    detokenizer.on_emit(emit(Row(ids_of("G"), 0, rid=other, opening=opening(rid=other)), closed=[(other, 0)]))
    assert detokenizer.live_requests == 1
    detokenizer.on_emit(emit(closed=[(RID, 1)]))
    assert detokenizer.live_requests == 0
    assert one(detokenizer, Row(ids_of("G"), 1, attempt=1)) == []
    assert detokenizer.unknown_rows == 1


def test_other_attempts_rows_are_dropped_and_counted(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    one(detokenizer, Row(ids_of("G"), 0, attempt=2, opening=opening(attempt=2)))
    assert one(detokenizer, Row(ids_of("G"), 1, attempt=1), Row(ids_of("G"), 1, attempt=3)) == []
    # An opening that comes late changes nothing.
    assert one(detokenizer, Row(ids_of("G"), 0, attempt=1, opening=opening(attempt=1))) == []
    assert detokenizer.unknown_rows == 3
    assert [delta.start for delta in one(detokenizer, Row(ids_of("G"), 1, attempt=2))] == [1]


def test_each_server_gets_its_rows_and_each_index_its_text(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    rids = [make_rid(server, 1, 5) for server in (0, 1, 0)]
    rows = [Row([ord("a") + n], 0, rid=rid, index=n, opening=opening(rid=rid)) for n, rid in enumerate(rids)]
    deltas = by_server_of(detokenizer, emit(*rows))
    found = {server: [(delta.rid, delta.index, delta.text) for delta in d] for server, d in deltas.items()}
    assert found == {0: [(rids[0], 0, "a"), (rids[2], 2, "c")], 1: [(rids[1], 1, "b")]}
    assert detokenizer.live_requests == 2


def test_columns_left_empty_mean_their_defaults(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    message = emit(Row([ord("x")], 0, opening=opening()))
    bare = dict.fromkeys(("indexes", "counts", "finishes", "matched", "matched_eos"), b"")
    fields = {name: getattr(message, name) for name in message.__struct_fields__} | bare
    (delta,) = by_server_of(detokenizer, Emit(**fields))[1]
    assert (delta.index, delta.text, delta.finish, delta.matched_id) == (0, "x", Finish.NONE, -1)
    assert delta.timing == TIMING
    assert delta.prompt_tokens == 1


@pytest.mark.parametrize("skip", [True, False])
def test_the_id_that_ends_an_output_is_an_id_without_text(vocabulary: Vocabulary, skip: bool) -> None:
    for matched, eos in ((EOS, True), (ord("x"), False)):
        detokenizer = Detokenizer(vocabulary)
        row = Row([ord("o"), matched], 0, finish=Finish.STOP, matched=matched, eos=eos)
        row.opening = opening(skip_special_tokens=skip)
        (delta,) = one(detokenizer, row)
        assert (delta.text, delta.ids) == ("o", i32(ord("o"), matched))
        assert (delta.finish, delta.matched_id, delta.matched_is_eos) == (Finish.STOP, matched, eos)


def test_an_end_flushes_half_characters_as_one_replacement(vocabulary: Vocabulary) -> None:
    cake = list("🍰".encode())
    for count in (1, 2, 3):
        assert steps(vocabulary, opening(), cake[:count]) == [""] * (count - 1) + ["\ufffd"]
    assert steps(vocabulary, opening(), cake) == ["", "", "", "🍰"]
    # What was held back for a stop string comes before what was held back for a character.
    assert steps(vocabulary, opening("ll€"), [*b"hell", 0xE2]) == ["h", "e", "", "", "ll\ufffd"]


def test_a_half_character_of_the_prompt(vocabulary: Vocabulary) -> None:
    cake = list("🍰".encode())
    prompt = [ord("?"), *cake[:2]]
    assert steps(vocabulary, opening(prompt=prompt), [*cake[2:], ord("!")]) == ["", "🍰", "!"]
    assert steps(vocabulary, opening(prompt=prompt), [ord("!")]) == ["\ufffd!"]
    # Without output there is no text.
    assert play(vocabulary, opening(prompt=prompt), [], []).text == ""


def test_no_new_tokens_at_all(vocabulary: Vocabulary) -> None:
    output = play(vocabulary, opening("DE"), [], [])
    (delta,) = output.deltas
    assert (delta.ids, delta.text, delta.finish, delta.timing) == (b"", "", Finish.LENGTH, TIMING)


def logprobs_of(count: int) -> TokenLogprobs:
    values = tuple(-0.5 - number for number in range(count))
    return TokenLogprobs(values, tuple(i32(number) for number in range(count)), tuple((value,) for value in values))


def test_logprobs_are_as_long_as_ids(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary)
    ids = ids_of("ABC", "DEF", "GHI")
    row = Row(ids, 0, opening=opening("DE", logprobs=1), logprobs=logprobs_of(3))
    (delta,) = one(detokenizer, row)
    assert delta.ids == i32(*ids[:2])
    assert delta.logprobs == logprobs_of(2)
    cut = Row(ids[:1], 0, opening=opening(logprobs=1), logprobs=logprobs_of(3))  # by the scheduler, at a stop id
    (delta,) = one(Detokenizer(vocabulary), cut)
    assert delta.logprobs == logprobs_of(1)
    (delta,) = one(Detokenizer(vocabulary), Row([], 0, opening=opening(logprobs=0), finish=Finish.LENGTH))
    assert delta.logprobs == TokenLogprobs((), (), ())


@pytest.mark.parametrize("payload", [None, logprobs_of(1)])
def test_a_row_without_its_logprobs_fails_its_request_alone(
    vocabulary: Vocabulary, payload: TokenLogprobs | None
) -> None:
    detokenizer = Detokenizer(vocabulary)
    bad = Row(ids_of("G", "J"), 0, opening=opening(logprobs=1), logprobs=payload)
    other = make_rid(1, 1, 8)
    good = Row(ids_of("G"), 0, rid=other, opening=opening(rid=other))
    failed, fine = one(detokenizer, bad, good)
    assert (failed.finish, failed.ids, failed.text) == (Finish.ERROR, b"", "")
    assert (fine.finish, fine.text) == (Finish.NONE, "G")
    assert one(detokenizer, Row(ids_of("G"), 2)) == []


def test_detokenize_calls(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json")
    library = Tokenizer.from_file(str(path))
    detokenizer = Detokenizer(read_vocabulary(str(path), 700))
    ids = [1, *library.encode(SAMPLES["emoji"]).ids]
    for skip in (True, False):
        to, reply = detokenizer.on_call(DetokenizeCall(RID, i32(*ids), skip))
        assert to == Address(StageKind.SERVER, 1)
        assert reply == DetokenizeReply(RID, library.decode(ids, skip_special_tokens=skip))
