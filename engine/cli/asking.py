"""Flags of a request, shared by `quintet generate` and `quintet chat`."""

import argparse
from typing import cast

from engine.arguments import number
from proto.messages import RequestParams, Sampling
from proto.parameters import Parameter, parameters_of
from quintet_client import ChatMessage, GenerateOptions

_DEFAULTS = {"max_new_tokens": 512}  # where the command's own differ from the server's
_FLAGS = tuple(p for p in (*parameters_of(Sampling), *parameters_of(RequestParams)) if p.spec.help)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Sampling and stopping, with the server's own defaults where a flag is not given."""
    group = parser.add_argument_group("sampling and stopping (defaults: the server's)")
    for parameter in _FLAGS:
        _add_flag(group, parameter)
    parser.add_argument("--timeout", type=number(), metavar="S", help="give up after S seconds")


def _add_flag(group: "argparse._ArgumentGroup", parameter: Parameter) -> None:
    spec = parameter.spec
    flag, name = spec.flag or f"--{spec.name.replace('_', '-')}", spec.name
    if parameter.kind is bool:
        group.add_argument(flag, dest=name, action="store_const", const=True, help=spec.help)
    elif parameter.kind == tuple[str, ...]:
        group.add_argument(flag, dest=name, action="append", metavar=spec.metavar, help=spec.help)
    else:
        text = f"{spec.help} (default: %(default)s)" if name in _DEFAULTS else spec.help
        default = _DEFAULTS.get(name)
        group.add_argument(flag, dest=name, type=parameter.kind, default=default, metavar=spec.metavar, help=text)


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """The fields that the user set."""
    given = {p.spec.name: value for p in _FLAGS if (value := getattr(args, p.spec.name)) is not None}
    return cast(GenerateOptions, given)


def conversation(system: str | None, user: str) -> list[ChatMessage]:
    """A chat of one question."""
    messages = [ChatMessage(role="system", content=system)] if system is not None else []
    return [*messages, ChatMessage(role="user", content=user)]
