"""Submits in, Admits and Rejects out."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from proto.channel import decode_as
from proto.ids import Address, StageKind, make_rid
from proto.messages import (
    Accepted,
    Admit,
    ChatMessage,
    Message,
    Opening,
    Reject,
    RejectCode,
    Resume,
    Submit,
    TokenizeCall,
    TokenizeReply,
    WorkerFacts,
)
from tests.builders import i32, ids_of, make_facts
from tests.text_requests import WORKER, make_call, make_submit
from tests.tiny_tokenizers import SAMPLES, SPECIALS, byte_level, manifest, sentence_piece
from tokenizer_proc.encoding import TokenizerError
from tokenizer_proc.requests import EncodingJob, RequestTokenizer

RID = make_rid(3, 1, 9)


class Kind:
    """One tokenizer, ours and the library's own."""

    def __init__(self, path: Path, eos_ids: tuple[int, ...] = (2,)) -> None:
        self.library = Tokenizer.from_file(str(path))
        self.ours = RequestTokenizer(manifest(path, eos_ids=eos_ids), template_timeout=0.5)

    def send(self, request: Submit | TokenizeCall, worker: WorkerFacts | None = WORKER, now: int = 1) -> list[Message]:
        """Everything that one request gives; the addresses are checked."""
        job = self.ours.prepare(request, now)
        replicas = {} if worker is None else {0: worker}
        letters = self.ours.answer(job, self.ours.encode([job])[0], replicas) if isinstance(job, EncodingJob) else [job]
        for to, message in letters:
            kind = StageKind.SCHEDULER if isinstance(message, Admit) else StageKind.SERVER
            assert to == Address(kind, 0 if isinstance(message, Admit) else request.rid >> 56)
        return [message for _, message in letters]

    def admit(self, request: Submit, worker: WorkerFacts = WORKER) -> Admit:
        admit, accepted = self.send(request, worker)
        assert isinstance(admit, Admit)
        assert accepted == Accepted(request.rid, request.attempt, 0, len(admit.prompt_ids) // 4)
        return admit

    def reject(self, request: Submit | TokenizeCall, worker: WorkerFacts | None = WORKER, now: int = 1) -> Reject:
        (reject,) = self.send(request, worker, now)
        assert isinstance(reject, Reject)
        assert reject.rid == request.rid
        assert reject.attempt == (request.attempt if isinstance(request, Submit) else 0)
        return reject


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """A tokenizer without BOS."""
    return Kind(byte_level(tmp_path_factory.mktemp("gpt") / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """A tokenizer that adds BOS, id 1."""
    return Kind(sentence_piece(tmp_path_factory.mktemp("llama") / "tokenizer.json"), (2, 5))


def test_a_text_is_admitted_with_all_that_was_asked(llama: Kind) -> None:
    submit = make_submit(
        "The fox",
        rid=RID,
        attempt=2,
        max_new_tokens=5,
        min_new_tokens=2,
        stop_strings=("a", "b"),
        stop_token_ids=i32(7, 9),
        include_stop=True,
        skip_special_tokens=False,
        logprobs=3,
        priority=4,
        cache_salt="x",
        deadline=99,
    )
    admit = llama.admit(submit)
    ids = ids_of(admit.prompt_ids)
    assert ids == llama.library.encode("The fox").ids
    assert ids[0] == 1
    assert (ids_of(admit.stop_ids), admit.num_eos) == ([2, 5, 7, 9], 2)
    assert (admit.max_new_tokens, admit.min_new_tokens) == (5, 2)
    assert (admit.priority, admit.cache_salt, admit.deadline, admit.arrival) == (4, "x", 99, 123)
    assert admit.sampling == submit.params.sampling
    assert decode_as(admit.opening, Opening) == Opening(
        RID, 2, len(ids), i32(*ids[-16:]), ("a", "b"), True, 2, False, 3, None
    )


def test_a_long_prompt_shows_its_end_to_the_detokenizer(gpt: Kind) -> None:
    ids = list(range(10, 60))
    opening = decode_as(gpt.admit(make_submit(ids)).opening, Opening)
    assert opening.prompt_tokens == 50
    assert ids_of(opening.prompt_tail) == ids[-16:]


def test_ignore_eos_leaves_the_callers_stops(llama: Kind) -> None:
    admit = llama.admit(make_submit("a", ignore_eos=True, stop_token_ids=i32(7)))
    assert (ids_of(admit.stop_ids), admit.num_eos) == ([7], 0)


def test_a_resume_is_output_not_prompt(gpt: Kind) -> None:
    resume = Resume(i32(20, 21), 5)
    admit = gpt.admit(make_submit([10, 11], attempt=1, resume=resume, max_new_tokens=60))
    assert (ids_of(admit.prompt_ids), ids_of(admit.output_ids)) == ([10, 11], [20, 21])
    assert admit.max_new_tokens == 60, "the output that is there counts in it"
    assert decode_as(admit.opening, Opening).resume == resume


@pytest.mark.parametrize(
    ("length", "asked", "resolved"),
    [
        (63, -1, 1),
        (63, 1, 1),
        (63, 0, 0),
        (64, 0, 0),
        (10, -1, 54),
        (10, 54, 54),
        (1, 63, 63),
    ],
)
def test_lengths_that_fit(gpt: Kind, length: int, asked: int, resolved: int) -> None:
    assert gpt.admit(make_submit([5] * length, max_new_tokens=asked)).max_new_tokens == resolved


@pytest.mark.parametrize(
    ("length", "asked", "field", "limit", "value"),
    [
        (64, 1, "token_ids.ids", 63, 64),
        (64, -1, "token_ids.ids", 63, 64),
        (65, 0, "token_ids.ids", 64, 65),
        (65, 2, "token_ids.ids", 64, 65),
        (63, 2, "stopping.max_new_tokens", 1, 2),
        (10, 55, "stopping.max_new_tokens", 54, 55),
    ],
)
def test_lengths_that_do_not_fit_are_named(
    gpt: Kind, length: int, asked: int, field: str, limit: int, value: int
) -> None:
    reject = gpt.reject(make_submit([5] * length, rid=RID, max_new_tokens=asked))
    assert (reject.code, reject.field) == (RejectCode.INVALID, field)
    assert f"must have at most {limit} tokens" in reject.message or f"must be at most {limit}," in reject.message
    assert f"not {value}" in reject.message


def test_a_token_that_only_the_tokenizer_knows_is_refused(gpt: Kind) -> None:
    """A model may have fewer ids than its tokenizer, whose added tokens come last. Ids are checked by the server."""
    few = msgspec.structs.replace(WORKER, vocab_size=3)
    reject = gpt.reject(make_submit(f"a{SPECIALS[2]}"), few)
    assert (reject.code, reject.field) == (RejectCode.INVALID, "text")
    assert "its token 0 has id" in reject.message
    assert "its ids are 0 to 2" in reject.message
    assert gpt.admit(make_submit([5]), few)


def test_the_limit_is_the_workers_and_the_field_the_callers(gpt: Kind) -> None:
    small = make_facts(max_model_len=4, vocab_size=601)
    assert gpt.reject(make_submit("The quick brown fox"), small).field == "text"
    assert gpt.reject(make_submit([ChatMessage("user", "x")]), small).field == "chat"
    assert gpt.admit(make_submit([1, 2, 3]), small).max_new_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "changes", "field", "message"),
    [
        ("", {}, "text", "at least 1"),
        ([], {}, "token_ids.ids", "at least 1"),
        ([5] * 60, {"min_new_tokens": 5}, "stopping.min_new_tokens", "must be at most 4, not 5"),
    ],
)
def test_bad_values_are_named(gpt: Kind, prompt: Any, changes: dict[str, Any], field: str, message: str) -> None:
    reject = gpt.reject(make_submit(prompt, **changes))
    assert (reject.code, reject.field) == (RejectCode.INVALID, field)
    assert message in reject.message
    assert gpt.admit(make_submit("a")), "the next request works"


def test_an_empty_text_is_bos_alone_where_there_is_one(llama: Kind) -> None:
    assert ids_of(llama.admit(make_submit("")).prompt_ids) == [1]


def test_a_past_deadline_and_a_missing_worker(gpt: Kind) -> None:
    assert gpt.reject(make_submit("a", deadline=10), now=10).code is RejectCode.DEADLINE
    assert gpt.reject(make_submit("a"), worker=None).code is RejectCode.UNAVAILABLE
    assert gpt.send(make_submit("a", deadline=10), now=9)


@pytest.mark.parametrize("sample", SAMPLES.values())
def test_tokenize_calls(gpt: Kind, llama: Kind, sample: str) -> None:
    for kind in (gpt, llama):
        for special in (True, False):
            expected = kind.library.encode(sample, add_special_tokens=special)
            (reply,) = kind.send(make_call(sample, RID, special), worker=None)
            assert reply == TokenizeReply(RID, i32(*expected.ids), tuple(expected.tokens))
    (reply,) = gpt.send(make_call(""))
    assert reply == TokenizeReply(1, b"", ())


def test_many_requests_are_encoded_together(gpt: Kind) -> None:
    """One batch gives what each of them gives alone."""
    texts = [sample * times for times in (1, 2) for sample in SAMPLES.values()]
    jobs = [gpt.ours.prepare(make_call(text), 0) for text in texts]
    assert [ids.tolist() for ids in gpt.ours.encode([job for job in jobs if isinstance(job, EncodingJob)])] == [
        gpt.library.encode(text).ids for text in texts
    ]


def test_facts(gpt: Kind, llama: Kind, tmp_path: Path) -> None:
    facts = llama.ours.facts
    assert (facts.eos_ids, facts.has_chat_template) == ((2, 5), True)
    assert gpt.ours.facts.vocab_size == gpt.library.get_vocab_size()
    bare = manifest(byte_level(tmp_path / "t.json"), chat_template=None)
    assert not RequestTokenizer(bare, 1.0).facts.has_chat_template


def test_a_file_that_asks_to_cut_prompts_is_not_obeyed(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "t.json")
    library = Tokenizer.from_file(str(path))
    library.enable_truncation(3)
    library.enable_padding(length=40)
    library.save(str(path))
    kind = Kind(path)
    plain = Tokenizer.from_file(str(byte_level(tmp_path / "plain.json")))
    assert ids_of(kind.admit(make_submit(SAMPLES["english"])).prompt_ids) == plain.encode(SAMPLES["english"]).ids


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    good = manifest(byte_level(tmp_path / "t.json"))
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"t\.json"):
        RequestTokenizer(good, 1.0)


def test_special_spellings_in_a_text_prompt_are_special(gpt: Kind) -> None:
    """A text is the caller's own whole prompt; only what stands in a chat has no power."""
    assert ids_of(gpt.admit(make_submit(f"a{SPECIALS[2]}")).prompt_ids)[-1] == 2
