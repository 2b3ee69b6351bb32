"""Count files, lines and functions of each part, and refuse files of the product that are too long to read at once.

Generated code is left out. Exits 1 when a file of the product has more than MAX_LINES.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 450
PRODUCT = ("proto", "server", "tokenizer_proc", "scheduler", "worker", "detokenizer_proc", "engine")
GENERATED = ("_pb2.py", "_pb2_grpc.py", "quintet_client/client.py")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of Python."""

    path: str
    lines: int
    functions: tuple[int, ...]  # lines of each


def read(root: Path, path: str) -> Source:
    text = (root / path).read_bytes()
    nodes = ast.walk(ast.parse(text, path))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Source(path, text.count(b"\n"), tuple((f.end_lineno or 0) - f.lineno + 1 for f in functions))


def sources(root: Path = ROOT) -> list[Source]:
    """Every file of Python that git knows or would know, without generated ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\0")
    return [read(root, name) for name in sorted(filter(None, names)) if not name.endswith(GENERATED)]


def row(name: str, files: Iterable[Source]) -> str:
    lengths = [file.lines for file in files]
    functions = [length for file in files for length in file.functions] or [0]
    return (
        f"{name:18}{len(lengths):6}{sum(lengths):8}{statistics.median(lengths):8.0f}{max(lengths):8}"
        f"{statistics.median(functions):11.0f}{max(functions):8}"
    )


def too_long(files: Iterable[Source]) -> list[str]:
    """One line for each file of the product beyond MAX_LINES."""
    return [
        f"{file.path} has {file.lines} lines; the limit is {MAX_LINES}"
        for file in files
        if file.path.partition("/")[0] in PRODUCT and file.lines > MAX_LINES
    ]


def main() -> int:
    files = sources()
    print(f"{'':18}{'files':>6}{'lines':>8}{'median':>8}{'longest':>8}{'functions:':>11}{'longest':>8}")
    product = [file for file in files if file.path.partition("/")[0] in PRODUCT]
    for part in (*PRODUCT, "tests", "scripts"):
        print(row(part, [file for file in files if file.path.startswith(part + "/")]))
    print(row("the product", product))
    lines = too_long(files)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
