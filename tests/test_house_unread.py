"""What scripts/check_unread.py finds and what it lets pass, in trees of a few lines."""

from pathlib import Path

import pytest

from scripts import check_unread
from scripts.check_unread import complaints


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product of one module whose function a test calls, but the product does not; the lists are empty."""
    for folder, text in (
        ("engine", "def measure() -> int:\n    return 1\n"),
        ("tests", "import engine.new\nassert engine.new.measure() == 1\n"),
        ("scripts", "print(1)\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "new.py").write_text(text)
    monkeypatch.setattr(check_unread, "READERS", {})
    monkeypatch.setattr(check_unread, "AWAITED", {})
    return tmp_path


def test_what_only_tests_read_is_unread(tree: Path) -> None:
    assert complaints(tree) == ["engine/new.py:1: unused function 'measure'"]


def test_what_a_script_does_not_read_itself_is_unread(tree: Path) -> None:
    (tree / "engine" / "new.py").write_text("")
    (tree / "tests" / "new.py").write_text("import scripts.new\nscripts.new.named()\n")
    (tree / "scripts" / "new.py").write_text("def named() -> None: ...\ndef forgotten() -> None: ...\n")
    assert complaints(tree) == ["scripts/new.py:2: unused function 'forgotten'"]


@pytest.mark.parametrize("which", ["READERS", "AWAITED"])
def test_a_listed_name_passes_until_its_line_is_stale(tree: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setattr(check_unread, which, {"whoever": ("measure",)})
    assert complaints(tree) == []
    (tree / "engine" / "new.py").write_text("")
    (line,) = complaints(tree)
    assert line.startswith("measure: ")
    assert line.endswith(f"strike it from {which}")


def test_a_reported_name_leaves_readers_when_it_is_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_unread, "READERS", {"whoever": ("measure",)})
    (tree / "engine" / "other.py").write_text("from engine import new\nprint(new.measure())\n")
    assert complaints(tree) == ["measure: no longer unread; strike it from READERS"]
