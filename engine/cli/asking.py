"""How a command's flags become a request: shared by `quintet generate` and `quintet chat`."""

import argparse
import math
from typing import cast

from quintet_client import ChatMessage, GenerateOptions

DEFAULT_MAX_NEW_TOKENS = 512
_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_strings", "ignore_eos")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Sampling and stopping, with the server's own defaults where a flag is not given."""
    group = parser.add_argument_group("sampling and stopping (defaults: the server's)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 = the most likely token (default: 1)")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest that together reach P")
    group.add_argument("--min-p", type=float, metavar="P", help="only those at least P times the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal answers")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        default=DEFAULT_MAX_NEW_TOKENS,
        help="tokens to generate at most (default: %(default)s)",
    )
    group.add_argument(
        "--stop", dest="stop_strings", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after the model's end")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="seconds after which the server gives up")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """The fields that the user set."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    return cast(GenerateOptions, given)


def conversation(system: str | None, user: str) -> list[ChatMessage]:
    """A chat of one question."""
    messages = [ChatMessage(role="system", content=system)] if system is not None else []
    return [*messages, ChatMessage(role="user", content=user)]
