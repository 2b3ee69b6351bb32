"""The `quintet` command. Each subcommand is a module here with `add_parser` and `run`, imported only when asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "serve": "run a model behind gRPC",
    "generate": "complete a prompt",
    "chat": "talk to a model in the terminal",
    "batch": "run a file of requests",
    "bench": "measure latency and throughput",
    "status": "show a server's processes and load",
    "doctor": "say what this machine can run, and why not",
    "estimate": "compute KV memory and how many sequences fit",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 used wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="quintet", description="LLM inference engine in five processes.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    if words and words[0] in _COMMANDS:
        module = importlib.import_module(f"engine.cli.{words[0]}")
        module.add_parser(commands)
        args = parser.parse_args(words)
        try:
            return int(module.run(args))
        except KeyboardInterrupt:
            return 130
    for name, summary in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    parser.parse_args(words)
    return 0
