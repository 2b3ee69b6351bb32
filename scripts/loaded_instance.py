"""What bench_ring.py and soak.py have in common: their flags, and an instance on a simulated GPU."""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.arguments import output_file, whole
from engine.instance import Instance

_SHAPES = Path(__file__).resolve().parent / "shapes"


def make_parser(
    docstring: str | None, *, streams: int, prompt_tokens: int, output_tokens: int
) -> argparse.ArgumentParser:
    """Declare the flags of both scripts, with a script's own defaults."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--model", default=str(_SHAPES / "llama-3.1-8b"), help="folder with a config.json")
    parser.add_argument("--device", default="sim:h200", help="simulated device (default: %(default)s)")
    counts = {
        "--streams": (streams, "streams at once"),
        "--prompt-tokens": (prompt_tokens, "tokens of each prompt"),
        "--output-tokens": (output_tokens, "tokens of each output"),
    }
    for name, (default, text) in counts.items():
        parser.add_argument(name, type=whole(1), default=default, metavar="N", help=f"{text} (default: %(default)s)")
    parser.add_argument("--serve-flags", type=shlex.split, default=[], help="more flags of `quintet serve`")
    parser.add_argument("-o", dest="output", type=output_file, metavar="FILE", help="write the result as JSON")
    return parser


@contextmanager
def started(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Run an instance; gives its address and the pid of each of its processes by name."""
    with Instance.start(["--model", args.model, "--device", args.device, *flags, *args.serve_flags]) as instance:
        pids = {stage["name"]: stage["pid"] for stage in instance.stages}
        yield instance.address, {**pids, "supervisor": instance.pid}


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write a result where -o says, if it was given."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
