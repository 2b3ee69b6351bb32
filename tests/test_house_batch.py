"""`quintet batch`: files in, files out, and what is left of a run that was cut off."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.cli.batch import Batch
from engine.cli.batch_file import Output, OutputError
from quintet_client.v1 import inference_pb2
from tests.fake_server import Failure, FakeServer, echo, prompt_text, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[str | int, dict[str, Any]]:
    """By id; fails when an id is there twice."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {record["id"]: record for record in found}
    assert len(by_id) == len(found)
    return by_id


def batch(fake: FakeServer, source: Path, *flags: str) -> int:
    out = source.with_name("out.jsonl")
    return main(["batch", str(source), "-o", str(out), "--address", fake.address, *flags])


def test_answers_each_kind_of_prompt(fake: FakeServer, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "one two", "max_new_tokens": 5, "temperature": 0},
        {"id": 7, "token_ids": [1, 2, 3], "stop_strings": ["x"], "work_class": "agent"},
        "",
        {"messages": [{"role": "user", "content": "hello you"}]},
    )
    assert batch(fake, source) == 0
    found = records(tmp_path / "out.jsonl")
    assert {record_id: record["text"] for record_id, record in found.items()} == {
        "a": "one two",
        7: "1 2 3",
        "line-4": "hello you",
    }
    assert found["a"]["finish"] == {"reason": "length"}
    assert (found["a"]["line"], found["a"]["prompt_tokens"], found["a"]["completion_tokens"]) == (1, 3, 2)
    sent = {prompt_text(request): request for request in fake.requests}
    assert sent["one two"].stopping.max_new_tokens == 5
    assert sent["one two"].sampling.HasField("temperature")
    assert sent["one two"].work_class == inference_pb2.WORK_CLASS_BATCH
    assert sent["1 2 3"].work_class == inference_pb2.WORK_CLASS_AGENT


BAD_LINES: dict[str, tuple[dict[str, Any] | str, str]] = {
    "not json": ("not json", "malformed"),
    "no prompt": ({"id": 1}, "needs exactly one of prompt, token_ids and messages, got 0"),
    "two prompts": ({"id": 1, "prompt": "x", "token_ids": [1]}, "got 2"),
    "wrong type": ({"id": 1, "prompt": "x", "max_new_tokens": "5"}, "$.max_new_tokens"),
    "unknown field": ({"id": 1, "prompt": "x", "max_tokens": 5}, "max_tokens"),
    "out of 32 bits": ({"id": 1, "prompt": "x", "max_new_tokens": 1 << 31}, "max_new_tokens: Value out of range"),
    "lone surrogate": ('{"id": 1, "prompt": "\\ud800"}', ""),
    "list": ("[1, 2]", "Expected `object`"),
    "same id": ({"id": "good", "prompt": "x"}, "id 'good' is already used by line 1"),
    "default id of another": ({"id": "line-9", "prompt": "x"}, "reserved for a line without an id"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_gets_a_record_and_harms_no_other(fake: FakeServer, tmp_path: Path, name: str) -> None:
    line, text = BAD_LINES[name]
    source = write(tmp_path / "in.jsonl", {"id": "good", "prompt": "a"}, line, {"id": "last", "prompt": "b"})
    assert batch(fake, source) == 1
    found = records(tmp_path / "out.jsonl")
    bad = next(record for record_id, record in found.items() if record_id not in ("good", "last"))
    assert bad["line"] == 2
    assert bad["error"]["code"] == "INVALID_ARGUMENT"
    assert text in bad["error"]["message"]
    assert (found["good"]["text"], found["last"]["text"]) == ("a", "b")
    assert len(fake.requests) == 2


def test_bytes_that_are_no_utf8(fake: FakeServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"id": 1, "prompt": "\xff"}\n{"id": 2, "prompt": "b"}')
    assert batch(fake, source) == 1
    found = records(tmp_path / "out.jsonl")
    assert "error" in found[1]
    assert found[2]["text"] == "b"


def test_what_the_server_refuses_gets_a_record(fake: FakeServer, tmp_path: Path) -> None:
    fake.reply = lambda request: (
        Failure(grpc.StatusCode.INVALID_ARGUMENT, "at most 8, not 9", "sampling.top_k")
        if request.text == "bad"
        else echo(request)
    )
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "bad"}, {"id": 2, "prompt": "fine"})
    assert batch(fake, source) == 1
    found = records(tmp_path / "out.jsonl")
    assert found[1]["error"] == {
        "code": "INVALID_ARGUMENT",
        "field": "sampling.top_k",
        "message": "at most 8, not 9",
    }
    assert found[2]["text"] == "fine"


def test_a_full_server_is_asked_again_for_as_long_as_it_takes(fake: FakeServer, tmp_path: Path) -> None:
    refusals = iter(range(12))  # more than the client's own attempts

    def reply(request: inference_pb2.GenerateRequest) -> list[str] | Failure:
        if next(refusals, None) is not None:
            return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry_after=0.01)
        return echo(request)

    fake.reply = reply
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "a"})
    assert batch(fake, source) == 0
    assert records(tmp_path / "out.jsonl")[1]["text"] == "a"


def test_a_second_run_does_only_the_rest(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(5)))
    assert batch(fake, source) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    write(source, *({"id": i, "prompt": f"p{i}"} for i in range(8)))
    assert batch(fake, source) == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert records(tmp_path / "out.jsonl").keys() == set(range(8))
    assert sorted(request.text for request in fake.requests) == sorted(f"p{i}" for i in range(8))
    assert "8 lines, 3 completed, 0 failed, 5 already done" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "code"), [({"id": 2, "prompt": "b"}, 0), ("bad line", 1)])
def test_nothing_left_to_do_needs_no_server(
    fake: FakeServer, tmp_path: Path, line: dict[str, Any] | str, code: int
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "a"}, line)
    assert batch(fake, source) == code
    before = (tmp_path / "out.jsonl").read_bytes()
    assert batch(fake, source, "--address", "127.0.0.1:1") == code
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_server_that_goes_leaves_lines_for_the_next_run(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.reply = lambda request: (
        Failure(grpc.StatusCode.UNAVAILABLE, "draining") if request.text == "p3" else echo(request)
    )
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(6)))
    assert batch(fake, source, "--concurrency", "1") == 1
    assert records(tmp_path / "out.jsonl").keys() == {0, 1, 2}
    assert "3 lines have no result: run the same command again. UNAVAILABLE: draining" in capsys.readouterr().err
    fake.reply = echo
    assert batch(fake, source) == 0
    assert records(tmp_path / "out.jsonl").keys() == set(range(6))


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_torn_last_line_is_done_again(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    output = Output(folder / "out.jsonl")
    output.append_records([{"id": i, "text": "naïve 🙂 \n text", "token_ids": [1, 2]} for i in range(4)])
    output.close()
    data = (folder / "out.jsonl").read_bytes()
    kept = data[: cut % (len(data) + 1)]
    (folder / "out.jsonl").write_bytes(kept)
    output = Output(folder / "out.jsonl")
    assert output.done == set(range(kept.count(b"\n")))
    output.append_records([{"id": i, "text": ""} for i in range(4) if i not in output.done])
    output.close()
    assert records(folder / "out.jsonl").keys() == set(range(4))


@pytest.mark.parametrize("text", ["precious", "precious\n", '{"id": 1, "prompt": "an input"}\n', "{}\n"])
def test_somebody_elses_file_is_left_alone(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "a"})
    (tmp_path / "out.jsonl").write_text(text)
    assert batch(fake, source) == 2
    assert (tmp_path / "out.jsonl").read_text() == text
    assert "not a result of this command" in capsys.readouterr().err


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl")
    with pytest.raises(OutputError, match="another run"):
        Output(tmp_path / "out.jsonl")
    output.close()
    Output(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.jsonl", "-o", "out.jsonl"], "missing.jsonl"),
        (["in.jsonl", "-o", "no/folder/out.jsonl"], "no/folder/out.jsonl"),
        (["in.jsonl", "-o", "/dev/null"], "not a regular file"),
    ],
)
def test_what_cannot_begin_exits_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", {"prompt": "a"})
    assert main(["batch", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_concurrency_of_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["batch", "in.jsonl", "-o", "out.jsonl", "--concurrency", "0"])
    assert ended.value.code == 2
    assert "argument --concurrency: must be at least 1, got 0" in capsys.readouterr().err


def test_a_full_disk_leaves_whole_lines_only(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(20)))
    output = Output(tmp_path / "out.jsonl")
    room = [700]

    def write_some(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = min(len(data), room[0], 100)
        room[0] -= taken
        return real(fd, data[:taken])

    real = os.write
    monkeypatch.setattr("engine.cli.batch_file.os.write", write_some)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(Batch(source, 20, output, 2).run(fake.address))
    monkeypatch.undo()
    output.close()
    assert all(record["text"] == f"p{record_id}" for record_id, record in records(tmp_path / "out.jsonl").items())
    assert batch(fake, source) == 0
    assert len(records(tmp_path / "out.jsonl")) == 20


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_again_and_again_it_ends_with_every_id_once(
    fake: FakeServer, tmp_path: Path, number: signal.Signals
) -> None:
    def slow_echo(request: inference_pb2.GenerateRequest) -> list[str]:
        time.sleep(0.01)
        return prompt_text(request).split(" ")

    fake.reply = slow_echo
    source = write(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i} " + "x" * 2000} for i in range(400)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "engine.cli", "batch", str(source), "-o", str(out)]
    command += ["--address", fake.address, "--concurrency", "4"]
    chance = random.Random(5)
    for _ in range(3):
        before = out.stat().st_size if out.exists() else 0
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            while process.poll() is None and (out.stat().st_size if out.exists() else 0) == before:
                time.sleep(0.01)
            time.sleep(chance.random() / 10)
            process.send_signal(number)
            process.communicate(timeout=10)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
    assert 0 < len(out.read_text().splitlines()) < 400
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert records(out).keys() == set(range(400))
