"""What no committed file may hold, and what the README promises."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cli import _COMMANDS, main
from scripts.check_imports import ROOT
from scripts.check_sizes import Source, read, sources, too_long

# Spelled so that this file does not hold them itself.
FORBIDDEN = {
    "conflict marker": re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE),
    "absolute path of a machine": re.compile(r"(?<![\w./-])/(work|home|root|Users|opt|tmp/[a-z]+)/[\w.]"),
    "note of unfinished work": re.compile("FIX" + "ME|XX" + "X|TO" + "DO"),
    "trailing blank": re.compile(r"[ \t]+$", re.MULTILINE),
}
MAX_BYTES = 200_000


def tracked() -> list[Path]:
    """Files that git knows; skips where this is no clone."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if "_pb2" not in path.name and path.name != "LICENSE":
            yield path, path.read_text()


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for path, text in texts()
        if (match := FORBIDDEN[what].search(text))
    ]
    assert found == []


def test_no_file_is_a_data_dump() -> None:
    assert [str(path) for path in tracked() if path.stat().st_size > MAX_BYTES] == []


def test_files_that_are_too_long_are_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for path, lines in {
        "worker/long.py": 451,
        "worker/short.py": 450,
        "worker/long_pb2.py": 999,
        "tests/long.py": 999,
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("pass\n" * lines)
    assert too_long(sources(tmp_path)) == ["worker/long.py has 451 lines; the limit is 450"]


def test_functions_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    def g():\n        pass\n\nasync def h(): ...\n")
    assert read(tmp_path, "a.py") == Source("a.py", 5, (3, 1, 2))


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_fits_a_page(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as exit_code:
        main([command, "--help"])
    assert exit_code.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: quintet {command}")
    assert len(text.splitlines()) <= 72


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in _COMMANDS)


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def commands(path: Path) -> list[list[str]]:
    """Every `quintet …` line of a document's fenced sh blocks, as words; continued lines joined."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].endswith("quintet"):
                end = next((i for i, word in enumerate(words) if word in ("&", "|", ">", "<", "&&", "2>&1")), None)
                found.append(words[1:end])
    return found


def test_documented_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes each of them; nothing is run."""
    import importlib

    checked = 0
    for document in documents():
        for words in commands(document):
            module = importlib.import_module(f"engine.cli.{words[0]}")
            ran: list[object] = []
            monkeypatch.setattr(module, "run", lambda args, ran=ran: ran.append(args) or 0)
            assert main(words) == 0, words
            assert ran, words
            checked += 1
    assert checked >= len(_COMMANDS)


def test_relative_links_of_documents_lead_somewhere() -> None:
    broken = [
        f"{document.name}: {target}"
        for document in documents()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert broken == []


def test_scripts_are_executable() -> None:
    scripts = [path for path in tracked() if path.read_bytes()[:2] == b"#!"]
    assert {"setup", "demo", "test", "check", "run"} <= {path.name for path in scripts}
    assert [str(path) for path in scripts if not path.stat().st_mode & 0o100] == []
