"""Who may import whom, read from the source."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

from scripts.check_imports import OURS, ROOT, STAGES, breaches, imports_of, source_files

HEAVY = {"torch", "transformers", "numba", "safetensors", "flashinfer", "matplotlib"}


def test_the_tree_keeps_the_rules() -> None:
    assert breaches() == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proto/new.py", "import engine"),
        ("proto/new.py", "from scheduler import pages"),
        ("scheduler/new.py", "import worker.loop"),
        ("scheduler/new.py", "from engine import config"),
        ("scheduler/new.py", "def f():\n    from torch import nn"),
        ("tokenizer_proc/new.py", "import zmq"),
        ("worker/layers/new.py", "from ...server import record"),
        ("engine/new.py", "import server"),
        ("engine/cli/new.py", "import torch"),
        ("proto/client/quintet_client/new.py", "import proto.messages"),
        ("server/new.py", "import pickle"),
        ("worker/layers/new.py", "from worker.cpu import ops"),
        ("worker/models/new.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import worker.cuda.ops"),
        ("worker/steps/new.py", "from worker.layers.norm import RmsNorm"),
        ("worker/sim/new.py", "def f():\n    from worker.cpu.pool import KvPool"),
        ("worker/ranks/new.py", "from worker import loop"),
        ("worker/attic/new.py", "import worker.steps.batch"),
        ("worker/cuda/new.py", "import worker.attic"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert [line.partition(":")[0] for line in breaches(tmp_path)] == [path]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scheduler/new.py", "import zlib, numpy\nfrom engine.runtime.stage import Stage\nfrom . import pages"),
        ("server/new.py", "from quintet_client.v1 import inference_pb2"),
        ("engine/cli/new.py", "from quintet_client import Client\nfrom engine.runtime import stage"),
        ("worker/layers/new.py", "import torch\nfrom ..steps.batch import StepBatch\nfrom proto import messages"),
        ("worker/cuda/new.py", "from worker.cuda import ops\nfrom worker.loader import load\nimport worker.device"),
        ("proto/channel.py", "import zmq"),
    ],
)
def test_what_is_allowed_is_not(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert breaches(tmp_path) == []


@pytest.mark.parametrize("text", ["from proto import first", "def f():\n    import proto.first", "from . import first"])
def test_a_cycle_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "first.py").write_text("if False:\n    from proto.second import thing")
    (tmp_path / "proto" / "second.py").write_text("import proto.third")
    (tmp_path / "proto" / "third.py").write_text("")
    assert breaches(tmp_path) == []
    (tmp_path / "proto" / "third.py").write_text(text)
    (line,) = breaches(tmp_path)
    _, _, circle = line.partition("import cycle: ")
    names = circle.split(" → ")
    assert names[0] == names[-1]
    assert set(itertools.pairwise(names)) == {
        ("proto.first", "proto.second"),
        ("proto.second", "proto.third"),
        ("proto.third", "proto.first"),
    }


def reached(start: str, modules: dict[str, Path]) -> dict[str, str]:
    """All that the import of `start` may ever import, ours and others', by name with whoever imports it."""
    found: dict[str, str] = {}
    queue = [start]
    while queue:
        module = queue.pop()
        for item in imports_of(module, modules[module]):
            parts = item.imported.split(".")
            names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            if parts[0] in OURS:
                names = [name for name in names if name in modules]
            for name in names:
                if name not in found:
                    found[name] = module
                    queue += [name] if name in modules else []
    return found


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "worker"])
def test_a_stage_without_torch_reaches_no_torch(stage: str) -> None:
    modules = dict(source_files())
    found = reached(f"{stage}.__main__", modules)
    assert "engine.runtime.stage" in found  # the walk works
    heavy = {name: importer for name, importer in found.items() if name.partition(".")[0] in HEAVY}
    assert heavy == {}


def test_the_walk_finds_the_workers_torch() -> None:
    assert "torch" in reached("worker.__main__", dict(source_files()))


def test_packages_are_importable_by_their_own_names_only() -> None:
    """No package of ours hides one of the standard library's."""
    assert not set(OURS) & sys.stdlib_module_names


def test_every_file_is_parsed() -> None:
    """source_files misses none: as many as a plain walk over the folders finds."""
    expected = {path for package in OURS[:2] + STAGES for path in (ROOT / package).rglob("*.py")}
    assert {path for _, path in source_files()} == expected
    assert all(ast.parse(path.read_bytes()) for path in expected if path.stat().st_size)
