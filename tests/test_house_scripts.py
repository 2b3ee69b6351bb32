"""scripts/setup with a fake interpreter, and scripts/lint_protos with a fake npx: what they run, and what they say."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.check_imports import ROOT

FAKE_PYTHON = """\
#!/bin/bash
echo "$@" >> "$FAKE_LOG"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *"version_info"*) [[ $FAKE_OLD != yes ]] ;;
    --version) echo "Python 3.9.2" ;;
    "-m pip install"*) echo "pip says why"; [[ $FAKE_PIP_FAILS != yes ]] ;;
esac
"""


class Clone:
    """A copy of what scripts/setup reads, with the fake interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name in ("scripts/setup", "pyproject.toml", "constraints.txt", "proto/client/pyproject.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def setup(self, *extras: str, **environment: str) -> tuple[int, str, list[str]]:
        """Exit code, stderr, and the pip calls that it made."""
        self.log.write_text("")
        given = {"PYTHON": str(self.python), "FAKE_LOG": str(self.log), "FAKE_OLD": "", "FAKE_PIP_FAILS": ""}
        done = subprocess.run(
            [self.folder / "scripts" / "setup", *extras],
            env={**os.environ, **given, **environment},
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        pips = [line for line in self.log.read_text().splitlines() if line.startswith("-m pip install -c")]
        return done.returncode, done.stderr, pips


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a folder")


def test_installs_once(clone: Clone) -> None:
    code, _, pips = clone.setup()
    assert (code, pips) == (0, ["-m pip install -c constraints.txt -e proto/client -e .[cpu]"])
    assert clone.setup() == (0, "", [])
    assert clone.setup("cpu") == (0, "", [])


def test_installs_again_when_what_it_rests_on_changed(clone: Clone) -> None:
    clone.setup()
    for name in ("pyproject.toml", "constraints.txt", "proto/client/pyproject.toml"):
        with (clone.folder / name).open("a") as file:
            file.write("\n# changed\n")
        assert len(clone.setup()[2]) == 1
        assert clone.setup()[2] == []


def test_an_extra_is_added_and_stays(clone: Clone) -> None:
    clone.setup()
    assert clone.setup("dev")[2] == ["-m pip install -c constraints.txt -e proto/client -e .[cpu,dev]"]
    assert clone.setup("dev")[2] == []
    assert clone.setup()[2] == []


def test_a_copy_elsewhere_is_installed_anew(clone: Clone, tmp_path: Path) -> None:
    clone.setup()
    shutil.copytree(clone.folder, tmp_path / "copy")
    clone.folder = tmp_path / "copy"
    assert len(clone.setup()[2]) == 1


def test_a_failure_is_shown_and_tried_again(clone: Clone) -> None:
    code, err, _ = clone.setup(FAKE_PIP_FAILS="yes")
    assert code == 1
    assert "pip says why" in err
    assert "pip could not install Quintet" in err
    assert len(clone.setup()[2]) == 1


def test_an_old_python_is_named(clone: Clone) -> None:
    code, err, pips = clone.setup(FAKE_OLD="yes")
    assert (code, pips) == (1, [])
    assert f"PYTHON={clone.python} is Python 3.9.2; Quintet needs Python 3.11 or newer" in err
    assert not (clone.folder / ".venv").exists()


def test_a_python_that_is_not_there_is_named(clone: Clone) -> None:
    code, err, _ = clone.setup(PYTHON="/no/such/python")
    assert code == 1
    assert "PYTHON=/no/such/python is not there" in err


def lint_protos(path: Path, **environment: str) -> tuple[int, str]:
    """Exit code and all output of scripts/lint_protos with the programs of one folder only."""
    for program in ("bash", "dirname"):
        (path / program).symlink_to(shutil.which(program) or "")
    done = subprocess.run(
        [ROOT / "scripts" / "lint_protos"],
        env={"PATH": str(path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_protos_are_linted_by_a_pinned_buf(tmp_path: Path) -> None:
    npx = tmp_path / "npx"
    npx.write_text('#!/bin/bash\necho "$@"; exit 3\n')
    npx.chmod(0o755)
    code, text = lint_protos(tmp_path)
    assert code == 3
    assert re.fullmatch(r"--yes --prefer-offline @bufbuild/buf@\d+\.\d+\.\d+ lint\n", text)


def test_without_npx_the_lint_is_skipped_loudly_but_not_in_ci(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "ci").mkdir()
    code, text = lint_protos(tmp_path / "here")
    assert (code, text.partition(":")[0]) == (0, "skipped")
    code, text = lint_protos(tmp_path / "ci", CI="true")
    assert code == 1
    assert "npx" in text
