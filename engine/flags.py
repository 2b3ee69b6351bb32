"""Command-line flags declared as the fields of a frozen dataclass: one declaration each, argparse is built from it.

A field's name is the flag's (`max_queue` is `--max-queue`), and its default the flag's; `flag` adds what a field cannot
say.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KEY = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What the command line says of one field."""

    group: str  # heading in --help
    help: str
    parse: Callable[[str], object] | None  # None: a switch, the field is a bool
    metavar: str | None
    name: str  # "" = the field's
    show: Callable[[Any], str]  # how --help writes the default
    supervisor: bool  # read by the supervisor alone; other flags are fields of some stage's options
    positional: bool  # its value may stand without the flag's name
    extra: Mapping[str, Any]  # more arguments of `add_argument`

    def option(self, dest: str) -> str:
        return f"--{self.name or dest.replace('_', '-')}"


def flag(
    group: str,
    help: str,
    parse: Callable[[str], object] | None = None,
    metavar: str | None = None,
    *,
    default: Any = MISSING,
    name: str = "",
    show: Callable[[Any], str] = str,
    supervisor: bool = False,
    positional: bool = False,
    **extra: Any,
) -> Any:
    """Declare a field of a configuration as a flag. Without a default it is required."""
    declared = Flag(
        group=group,
        help=help,
        parse=parse,
        metavar=metavar,
        name=name,
        show=show,
        supervisor=supervisor,
        positional=positional,
        extra=extra,
    )
    return field(default=default, metadata={_KEY: declared})


def flags_of(config: type) -> dict[str, Flag]:
    """The flags that a configuration declares, by field, in the order of its fields."""
    return {item.name: item.metadata[_KEY] for item in fields(config)}


def add_flags(parser: argparse.ArgumentParser, config: type, only: Collection[str] | None = None) -> None:
    """Declare the flags of a configuration, or `only` those fields', in their groups."""
    defaults = {item.name: item.default for item in fields(config)}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for dest, declared in flags_of(config).items():
        if only is None or dest in only:
            if declared.group not in groups:
                groups[declared.group] = parser.add_argument_group(declared.group)
            _add(groups[declared.group], dest, declared, defaults[dest])


def values_of(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields' values in parsed arguments, lists as tuples."""
    values = {item.name: getattr(args, item.name) for item in fields(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _add(group: argparse._ArgumentGroup, dest: str, declared: Flag, default: Any) -> None:
    settings: dict[str, Any] = {"help": declared.help, **declared.extra}
    option = declared.option(dest)
    if declared.parse is None:
        settings |= {"action": _switch(option, default), "default": default, "dest": dest}
    else:
        settings |= {"type": declared.parse, "metavar": declared.metavar}
    if declared.positional:
        either = group.add_mutually_exclusive_group(required=default is MISSING)
        either.add_argument(dest, nargs="?", default=argparse.SUPPRESS, **settings)
        either.add_argument(option, **settings | {"help": f"another way to name {declared.metavar}"})
        return
    if default is MISSING:
        settings["required"] = True
    elif declared.parse is not None:
        settings |= {"default": list(default) if isinstance(default, tuple) else default, "dest": dest}
        if declared.help != argparse.SUPPRESS and default not in (None, ()):
            settings["help"] += f" (default: {declared.show(default)})"
    group.add_argument(option, **settings)


def _switch(option: str, default: bool) -> Any:
    """`--enable-x` that is on by default has a `--no-enable-x`; `--disable-x` turns `x` off."""
    if not default:
        return "store_true"
    return "store_false" if option.startswith("--disable-") else argparse.BooleanOptionalAction
