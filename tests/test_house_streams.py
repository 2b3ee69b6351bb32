"""The command with standard streams that are closed, full, or read by nobody."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fake_server import FakeServer, serving

pytestmark = pytest.mark.slow


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def shell(words: str, redirection: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command whose streams the shell bends first."""
    command = f"exec '{sys.executable}' -P -m engine.cli {words} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


def generate(fake: FakeServer, words: str, redirection: str) -> tuple[int, str, str]:
    return shell(f"generate --address {fake.address} {words}", redirection)


def test_closed_stdout_swallows_the_answer(fake: FakeServer) -> None:
    assert generate(fake, "'one two'", ">&-") == (0, "", "")
    assert len(fake.requests) == 1


def test_closed_stdin_is_an_empty_prompt(fake: FakeServer) -> None:
    assert generate(fake, "", "<&-")[::2] == (0, "")
    assert fake.requests[0].chat.messages[0].content == ""


def test_closed_stderr_takes_no_other_place(fake: FakeServer) -> None:
    assert generate(fake, "'one two' --stats", "2>&-") == (0, "one two\n", "")


@pytest.mark.parametrize("words", ["generate one", "status", "status --json"])
def test_a_full_disk_behind_stdout_is_one_line(fake: FakeServer, words: str) -> None:
    code, _, err = shell(f"{words} --address {fake.address}", ">/dev/full")
    assert (code, err) == (1, "quintet: No space left on device\n")
