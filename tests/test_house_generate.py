"""`quintet generate` against a server without a ring: what it prints, sends and returns."""

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.clock import TokenClock, percentiles
from engine.cli import main
from tests.fake_server import Failure, FakeServer, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def generate(fake: FakeServer, *flags: str) -> int:
    return main(["generate", "--address", fake.address, *flags])


def test_streams_the_answer_alone_to_stdout(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(fake, "one two three") == 0
    assert capsys.readouterr() == ("one two three\n", "")


def test_sends_what_the_flags_say(fake: FakeServer) -> None:
    flags = "--system polite --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7"
    flags += " --max-new-tokens 5 --stop a --stop b --ignore-eos"
    assert generate(fake, "hello", *flags.split()) == 0
    request = fake.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "polite"), ("user", "hello")]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (
        0.5,
        4,
        0.9,
        0.1,
        7,
    )
    assert request.stopping.max_new_tokens == 5
    assert list(request.stopping.stop_strings) == ["a", "b"]
    assert request.stopping.ignore_eos


def test_leaves_unset_what_no_flag_says(fake: FakeServer) -> None:
    assert generate(fake, "hello") == 0
    assert not fake.requests[0].sampling.ListFields()
    assert not fake.requests[0].stopping.HasField("ignore_eos")


@pytest.mark.parametrize(
    ("has_template", "flags", "kind"),
    [(True, [], "chat"), (False, [], "text"), (True, ["--raw"], "text"), (False, ["--chat"], "chat")],
)
def test_is_a_chat_where_the_model_can(fake: FakeServer, has_template: bool, flags: list[str], kind: str) -> None:
    fake.has_chat_template = has_template
    assert generate(fake, "hello", *flags) == 0
    assert fake.requests[0].WhichOneof("prompt") == kind


def test_reads_the_prompt_from_stdin(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert generate(fake, "--raw") == 0
    assert fake.requests[0].text == "from a pipe"


def test_json_is_one_object(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(fake, "one two three", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "one two three"
    assert record["token_ids"] == [0, 1, 2]
    assert record["finish"] == {"reason": "stop", "eos_token_id": 2}
    assert (record["prompt_tokens"], record["cached_tokens"], record["completion_tokens"]) == (3, 1, 3)
    assert record["seed"] == 99
    assert record["ttft_ms"] > 0


def test_stats_go_to_stderr(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(fake, "one two three", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    assert "TTFT" in err
    assert "p50" in err
    assert "p99" in err
    assert "tokens a second" in err
    assert "finish: reason 'stop', eos token id 2" in err


def test_an_error_is_one_line_with_code_field_and_text(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.reply = lambda _: Failure(grpc.StatusCode.INVALID_ARGUMENT, "must be above 0,\nnot -1", "sampling.top_p")
    assert generate(fake, "hello") == 1
    assert capsys.readouterr() == ("", "quintet: INVALID_ARGUMENT: sampling.top_p: must be above 0, not -1\n")


def test_a_number_that_no_message_can_hold_is_an_error(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(fake, "hello", "--seed", "-1") == 1
    assert "-1" in capsys.readouterr().err
    assert not fake.requests


def test_nobody_at_the_address_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--address", "127.0.0.1:1"]) == 1
    assert "no server answers at 127.0.0.1:1: start one with `quintet serve`" in capsys.readouterr().err


def test_system_contradicts_raw(fake: FakeServer) -> None:
    assert generate(fake, "hello", "--raw", "--system", "be kind") == 2


@pytest.mark.slow
def test_interrupt_cancels_the_request_and_exits_130(fake: FakeServer) -> None:
    fake.hold = threading.Event()
    command = [sys.executable, "-P", "-m", "engine.cli", "generate", "one two", "--address", fake.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"one"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert fake.cancelled.wait(5)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(fake: FakeServer) -> None:
    fake.reply = lambda _: ["x" * 1000] * 500
    command = [sys.executable, "-P", "-m", "engine.cli", "generate", "hello", "--address", fake.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 1


def test_clock_by_hand() -> None:
    clock = TokenClock(started=10.0)
    for tokens, now in ((0, 10.1), (1, 10.2), (1, 10.3), (2, 10.5), (0, 10.9)):
        clock.count(tokens, now)
    numbers = clock.numbers()
    assert numbers["ttft_ms"] == pytest.approx(200)
    assert clock.gaps == pytest.approx([0.1, 0.1, 0.1])
    assert numbers["tokens_per_second"] == pytest.approx(10)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_a_value_with_enough_below(values: list[float], percent: float) -> None:
    (found,) = percentiles(values, [percent])
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100


@pytest.mark.parametrize(
    "flags", [["--address", ""], ["--address", "host:0"], ["--timeout", "nan"], ["--timeout", "0"]], ids=" ".join
)
def test_flags_out_of_range_are_named_before_anything_is_asked(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert flags[0] in error
    assert repr(flags[1]) in error
