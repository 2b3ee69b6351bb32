"""`quintet chat` against a server without a ring, driven as a script drives it."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest

from engine.cli import main
from engine.cli.chat import ChatLoop
from quintet_client import Client
from quintet_client.v1 import inference_pb2
from tests.fake_server import Failure, FakeServer, echo, prompt_text, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def chat(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, lines: str, *flags: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "--address", fake.address, *flags])


def turns(request: inference_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_keeps_the_history(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(fake, monkeypatch, "first\n\nsecond one\n", "--system", "be kind") == 0
    assert capsys.readouterr() == ("first\nsecond one\n", "")
    assert turns(fake.requests[1]) == [
        ("system", "be kind"),
        ("user", "first"),
        ("assistant", "first"),
        ("user", "second one"),
    ]


def test_commands(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(fake, monkeypatch, "a\n/reset\nb\n/system new\nc\n/system\n/help\nd\n/quit\ne\n") == 0
    assert [turns(request) for request in fake.requests] == [
        [("user", "a")],
        [("user", "b")],
        [("system", "new"), ("user", "b"), ("assistant", "b"), ("user", "c")],
        [("user", "b"), ("assistant", "b"), ("user", "c"), ("assistant", "c"), ("user", "d")],
    ]
    assert "/reset" in capsys.readouterr().out


def test_an_unknown_command_is_told_and_not_sent(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(fake, monkeypatch, "/rest\n") == 1
    assert "unknown command /rest" in capsys.readouterr().err
    assert not fake.requests


def test_a_failed_turn_leaves_the_conversation_as_it_was(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(request: inference_pb2.GenerateRequest) -> list[str] | Failure:
        if prompt_text(request) == "bad":
            return Failure(grpc.StatusCode.INVALID_ARGUMENT, "too long", "chat")
        return echo(request)

    fake.reply = reply
    assert chat(fake, monkeypatch, "a\nbad\nb\n") == 1
    assert turns(fake.requests[2]) == [("user", "a"), ("assistant", "a"), ("user", "b")]
    assert "INVALID_ARGUMENT: chat: too long" in capsys.readouterr().err


def test_interrupt_at_the_prompt_of_a_terminal_drops_the_line(fake: FakeServer) -> None:
    script: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "hello", EOFError()])
    written: list[str] = []

    def read() -> str:
        item = next(script)
        if isinstance(item, BaseException):
            raise item
        return item

    with Client(fake.address) as client:
        loop = ChatLoop(client, None, {}, read, written.append)
        loop.run(interactive=True)
    assert [turn["content"] for turn in loop.turns] == ["hello", "hello"]
    assert not loop.failed


@pytest.mark.slow
def test_interrupt_stops_the_answer_and_keeps_what_was_said(fake: FakeServer) -> None:
    fake.hold = threading.Event()
    command = [sys.executable, "-P", "-m", "engine.cli", "chat", "--address", fake.address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write(b"one two\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 100) == b"one"
        process.send_signal(signal.SIGINT)
        assert fake.cancelled.wait(5)
        fake.hold.set()
        out, err = process.communicate(b"more\n", timeout=10)
    assert (process.returncode, err) == (0, b"")
    assert out.decode() == " …\nmore\n"
    assert turns(fake.requests[1]) == [("user", "one two"), ("assistant", "one"), ("user", "more")]
