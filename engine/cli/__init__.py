"""The `quintet` command. Each subcommand is a module here with `add_parser` and `run`, imported only when asked for."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli.errors import FAILED, INTERRUPTED, USED_WRONGLY, CommandError, complain
from engine.cli.streams import give_up_stdout, open_missing

_COMMANDS = {
    "serve": "run a model behind gRPC",
    "generate": "answer a prompt, streamed to the terminal",
    "chat": "talk to a model in the terminal",
    "batch": "run a file of requests",
    "bench": "measure latency and throughput",
    "status": "show a server's processes and load",
    "doctor": "say what this machine can run, and why not",
    "estimate": "compute KV memory and how many sequences fit",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    open_missing()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except CommandError as error:
        complain(str(error))
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads our output any more
        give_up_stdout()
        return FAILED
    except OSError as error:  # a full disk behind stdout, say; commands explain those of their own files
        complain(f"{error.filename + ': ' if error.filename else ''}{error.strerror or error}")
        give_up_stdout()
        return FAILED
    return code


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="quintet", description="LLM inference engine in five processes.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    if words and words[0] in _COMMANDS:
        # Check first: importing a command with a foreign `proto` ends in a traceback. The doctor reports it itself.
        if words[0] != "doctor" and (clash := _foreign_proto()):
            raise CommandError(clash, USED_WRONGLY)
        module = importlib.import_module(f"engine.cli.{words[0]}")
        module.add_parser(commands)
        return int(module.run(parser.parse_args(words)))
    for name, summary in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    parser.parse_args(words)
    return 0


def _foreign_proto() -> str:
    """Say what is wrong when `import proto` finds another distribution's package; "" when it is ours."""
    spec = importlib.util.find_spec("proto")
    ours = Path(__file__).resolve().parents[2] / "proto" / "__init__.py"
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == ours:
        return ""
    found = spec.origin if spec is not None else None
    return (
        f"`import proto` finds {found} instead of {ours}: another distribution, such as proto-plus, installs a package "
        "of that name. Install Quintet in an environment of its own"
    )
