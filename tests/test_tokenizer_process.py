"""The tokenizer as a process of its own."""

import time
from pathlib import Path

import pytest

from proto.config import TokenizerOptions
from proto.ids import StageKind, make_rid
from proto.messages import (
    Accepted,
    Admit,
    ChatMessage,
    Message,
    Reject,
    RejectCode,
    TokenizeReply,
    TokenizerFacts,
)
from proto.model import ModelManifest
from tests.builders import make_facts
from tests.text_requests import WORKER, make_call, make_submit
from tests.text_stage import TextStage
from tests.tiny_tokenizers import SAMPLES, byte_level, large_byte_level, manifest

pytestmark = pytest.mark.slow


def start(model: ModelManifest) -> TextStage:
    return TextStage(StageKind.TOKENIZER, TokenizerOptions(manifest=model, template_timeout=0.5))


def rid_of(message: Message) -> int:
    return int(getattr(message, "rid", -1))


def test_it_serves_calls_submits_and_rejects(tmp_path: Path) -> None:
    model = manifest(byte_level(tmp_path / "t.json"))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with start(model) as stage:
        ready, _ = stage.ready()
        assert isinstance(ready.facts, TokenizerFacts)
        assert ready.facts.has_chat_template
        stage.outbox.send(make_submit("too early", rid=1))
        reject = stage.receive(stage.server)
        assert isinstance(reject, Reject)
        assert reject.code is RejectCode.UNAVAILABLE
        stage.tell_of_worker(WORKER)
        for number in range(100):
            stage.outbox.send(make_submit("The fox", rid=number, max_new_tokens=1000 if number % 3 == 0 else 1))
        answers = [stage.receive(stage.server) for _ in range(100)]
        assert sorted(map(rid_of, answers)) == list(range(100))
        assert all(isinstance(a, Reject if rid_of(a) % 3 == 0 else Accepted) for a in answers)
        admits = {rid_of(stage.receive(stage.scheduler, lambda m: isinstance(m, Admit))) for _ in range(66)}
        assert admits == {number for number in range(100) if number % 3}
        stage.outbox.send(make_call([ChatMessage("user", "x")], rid=7))
        assert isinstance(stage.receive(stage.server), TokenizeReply)
        counters = stage.counters(lambda c: c["requests"] == 102)
        assert counters["prompt_tokens"] > 0
    bad = manifest(byte_level(tmp_path / "t.json"), chat_template=loop)
    with start(bad) as stage:
        stage.outbox.send(make_call([ChatMessage("user", "x")], rid=8))
        stage.outbox.send(make_call("x", rid=9))
        answers = sorted((stage.receive(stage.server) for _ in range(2)), key=rid_of)
        refused, answered = answers
        assert isinstance(refused, Reject)
        assert (refused.code, refused.field) == (RejectCode.INVALID, "chat")
        assert isinstance(answered, TokenizeReply)


def test_a_long_text_keeps_nobody_waiting(tmp_path: Path) -> None:
    model = manifest(byte_level(tmp_path / "t.json"))
    text = SAMPLES["english"] * 20_000
    with start(model) as stage:
        stage.ready()
        stage.tell_of_worker(make_facts(max_model_len=1 << 22, vocab_size=601))
        before = stage.rss_mb()
        begin = time.monotonic()
        stage.outbox.send(make_submit(text, rid=1))
        waits = []
        finished = False
        while not finished:
            stage.outbox.send(make_call("The fox", rid=2))
            sent = time.monotonic()
            answer = stage.receive(stage.server, lambda m: isinstance(m, TokenizeReply | Accepted))
            if isinstance(answer, Accepted):
                finished = True
                assert answer.prompt_tokens > 100_000
            else:
                waits.append(time.monotonic() - sent)
            time.sleep(0.01)
        took = time.monotonic() - begin
        assert len(waits) > 5, f"the long one took only {took} s"
        assert sorted(waits)[len(waits) // 2] < took / 10
        stage.receive(stage.scheduler, lambda m: isinstance(m, Admit))
        stage.counters(lambda c: c["prompt_tokens"] > 100_000)
        assert stage.rss_mb() < before + 60, "the memory of a long text is given back"


def test_memory_and_start_with_150_000_ids(tmp_path: Path) -> None:
    path = large_byte_level(tmp_path / "large.json", byte_level(tmp_path / "t.json"))
    with start(manifest(path)) as stage:
        ready, took = stage.ready()
        assert isinstance(ready.facts, TokenizerFacts)
        assert ready.facts.vocab_size == 150_000
        assert took < 5
        for number in range(20):
            stage.outbox.send(make_call(SAMPLES["code"] * 20, rid=number))
            stage.receive(stage.server)
        assert stage.rss_mb() < 150


@pytest.mark.model
def test_memory_with_the_demo_model(demo_manifest: ModelManifest) -> None:
    with start(demo_manifest) as stage:
        _, took = stage.ready()
        assert took < 5
        for number in range(50):
            stage.outbox.send(make_call([ChatMessage("user", SAMPLES["korean"] * 20)], rid=number))
            stage.receive(stage.server)
        assert stage.rss_mb() < 100
        assert "libtorch" not in stage.maps()


def test_a_missing_tokenizer_ends_the_start(tmp_path: Path) -> None:
    model = manifest(byte_level(tmp_path / "t.json"))
    (tmp_path / "t.json").unlink()
    assert "t.json" in start(model).failure()


def test_replies_go_to_the_server_that_asked(tmp_path: Path) -> None:
    with start(manifest(byte_level(tmp_path / "t.json"))) as stage:
        stage.outbox.send(make_call("x", rid=make_rid(1, 1, 1)))
        stage.outbox.send(make_call("x", rid=make_rid(0, 1, 1)))
        assert rid_of(stage.receive(stage.server)) == make_rid(0, 1, 1)
