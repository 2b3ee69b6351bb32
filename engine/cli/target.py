"""Which server a command talks to: a running one, or an instance of its own."""

import argparse
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from engine.arguments import host_port
from engine.cli.errors import USED_WRONGLY, CommandError
from engine.cli.printing import describe_error
from engine.instance import Instance, InstanceError
from engine.port import DEFAULT_HOST, DEFAULT_PORT
from quintet_client import QuintetError


def add_address_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        type=host_port,
        default=f"{DEFAULT_HOST}:{DEFAULT_PORT}",
        help="server to talk to (default: %(default)s)",
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--address`, and `--model` with `--serve-flags` for an instance of the command's own."""
    group = parser.add_argument_group("server")
    either = group.add_mutually_exclusive_group()
    add_address_argument(either)
    either.add_argument("--model", help="start an instance of this model for the command: see `quintet serve --help`")
    group.add_argument(
        "--serve-flags",
        metavar="'FLAGS'",
        type=shlex.split,
        default=[],
        help="flags of `quintet serve` for the instance that --model starts, as in --serve-flags='--dtype float32'",
    )


@contextmanager
def open_target(args: argparse.Namespace) -> Iterator[str]:
    """Give the address of the server that `args` name; an instance of our own ends with the context.

    Raises CommandError when that does not come up, and for failed calls inside the context.
    """
    if args.model is None:
        if args.serve_flags:
            raise CommandError("--serve-flags needs --model, which starts the instance that they are for", USED_WRONGLY)
        with calls_explained(args.address):
            yield args.address
        return
    try:
        with Console(stderr=True).status(f"starting {args.model}") as status:
            instance = Instance.start(["--model", args.model, *args.serve_flags], echo=_LastLine(status))
        with instance, calls_explained(instance.address):
            yield instance.address
    except InstanceError as error:
        raise CommandError(str(error)) from None


@contextmanager
def calls_explained(address: str) -> Iterator[None]:
    """Turn the error of a failed call into a CommandError."""
    try:
        yield
    except QuintetError as error:
        raise CommandError(describe_error(error, address)) from None


class _LastLine(io.StringIO):
    """A stream that shows the last line written to it beside a spinner, if there is a terminal."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    def write(self, text: str) -> int:
        if text.strip():
            self._status.update(escape(text.strip()))
        return len(text)
