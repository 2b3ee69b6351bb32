"""Which server a command talks to: a running one, or an instance of its own."""

import argparse
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from engine.instance import Instance

DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_address_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        type=_address,
        default=DEFAULT_ADDRESS,
        help="a running server (default: %(default)s)",
    )


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 1..65535")
    return text


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """`--address`, or `--model` with `--serve-flags` for the instance that it starts."""
    group = parser.add_argument_group("server")
    either = group.add_mutually_exclusive_group()
    add_address_argument(either)
    either.add_argument("--model", help="start an instance for this command alone: demo, a folder, a .gguf, org/name")
    group.add_argument(
        "--serve-flags",
        metavar="'FLAGS'",
        type=shlex.split,
        default=[],
        help="more flags of `quintet serve` for that instance, as in --serve-flags='--dtype float32'",
    )


@contextmanager
def open_target(args: argparse.Namespace) -> Iterator[str]:
    """Address of the server that `args` name; an instance of our own ends with the context.

    Raises InstanceError when that does not come up.
    """
    if args.model is None:
        if args.serve_flags:
            raise SystemExit("quintet: --serve-flags are for an instance that --model starts")
        yield args.address
        return
    with Console(stderr=True).status(f"starting {args.model}") as status:
        instance = Instance.start(["--model", args.model, *args.serve_flags], echo=_LastLine(status))
    with instance:
        yield instance.address


class _LastLine(io.StringIO):
    """A stream that shows the last line written to it beside a spinner, where there is a terminal."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    def write(self, text: str) -> int:
        if text.strip():
            self._status.update(escape(text.strip()))
        return len(text)
