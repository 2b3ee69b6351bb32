"""The detokenizer as a process of its own."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from proto.config import DetokenizerOptions
from proto.ids import StageKind
from proto.messages import Deltas, DetokenizeCall, DetokenizeReply, Finish
from proto.model import ModelManifest
from tests.builders import i32
from tests.test_detokenizer_emit import Row, emit, opening
from tests.text_stage import TextStage
from tests.tiny_tokenizers import SAMPLES, byte_level, large_byte_level, manifest

pytestmark = pytest.mark.slow


def start(model: ModelManifest) -> TextStage:
    return TextStage(StageKind.DETOKENIZER, DetokenizerOptions(manifest=model))


def stream(stage: TextStage, model: ModelManifest, requests: int) -> None:
    """Send the samples as many requests, token by token, and compare what comes with the library's text."""
    library = Tokenizer.from_file(model.tokenizer_json)
    ids = library.encode("".join(SAMPLES.values())).ids
    texts = [""] * requests
    for place, number in enumerate(ids):
        last = place == len(ids) - 1
        rows = [
            Row(
                [number],
                place,
                rid=rid,
                finish=Finish.LENGTH if last else Finish.NONE,
                opening=None if place else opening(rid=rid, prompt=ids[:1]),
            )
            for rid in range(requests)
        ]
        stage.outbox.send(emit(*rows))
        deltas = stage.receive(stage.server, lambda m: isinstance(m, Deltas))
        assert isinstance(deltas, Deltas)
        for delta in deltas.rows:
            texts[delta.rid] += delta.text
    assert texts == [library.decode(ids)] * requests


def test_it_streams_answers_calls_and_counts(tmp_path: Path) -> None:
    model = manifest(byte_level(tmp_path / "t.json"))
    with start(model) as stage:
        stage.ready()
        stream(stage, model, 4)
        library = Tokenizer.from_file(model.tokenizer_json)
        ids = library.encode(SAMPLES["arabic"]).ids
        stage.outbox.send(DetokenizeCall(5, i32(*ids), True))
        assert stage.receive(stage.server) == DetokenizeReply(5, SAMPLES["arabic"])
        stage.outbox.send(emit(Row([3], 0, rid=99)))
        counters = stage.counters(lambda c: c["unknown_rows"] == 1)
        assert counters["tokens"] == 4 * len(library.encode("".join(SAMPLES.values())).ids)
        assert counters["live_requests"] == 0


def test_memory_and_start_with_150_000_ids(tmp_path: Path) -> None:
    model = manifest(large_byte_level(tmp_path / "large.json", byte_level(tmp_path / "t.json")))
    with start(model) as stage:
        _, took = stage.ready()
        assert took < 5
        rng = np.random.default_rng(1)
        for step in range(50):
            rows = [
                Row([int(rng.integers(150_000))], step, rid=r, opening=None if step else opening("stop", rid=r))
                for r in range(256)
            ]
            stage.outbox.send(emit(*rows))
            stage.receive(stage.server)
        assert stage.rss_mb() < 150


@pytest.mark.model
def test_memory_with_the_demo_model(demo_manifest: ModelManifest) -> None:
    with start(demo_manifest) as stage:
        stage.ready()
        stream(stage, demo_manifest, 32)
        assert stage.rss_mb() < 100
        assert "libtorch" not in stage.maps()


def test_a_missing_tokenizer_ends_the_start(tmp_path: Path) -> None:
    model = manifest(byte_level(tmp_path / "t.json"))
    (tmp_path / "t.json").unlink()
    assert "t.json" in start(model).failure()
