"""Command-line flags as the fields of a frozen dataclass: each is declared once, and argparse is built from it.

The flag of a field has its name (`max_queue` is `--max-queue`) and its default; `flag` adds what a field cannot say.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KEY = "flag"


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field appears on the command line."""

    group: str  # heading in --help
    help: str
    parse: Callable[[str], object] | None = None  # None: a switch, the field is a bool
    metavar: str | None = None
    name: str = ""  # "" = the field's
    show: Callable[[Any], str] = lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    supervisor: bool = False  # for the supervisor alone; other flags are options of some stage, by the same name
    extra: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `add_argument`

    def option(self, dest: str) -> str:
        return f"--{self.name or dest.replace('_', '-')}"


def flag(*declared: Any, default: Any = MISSING, **more: Any) -> Any:
    """Declare a field as a `Flag`. Without a default it is required, and its name may be left out."""
    return field(default=default, metadata={_KEY: Flag(*declared, **more)})


def flags_of(config: type) -> dict[str, Flag]:
    """Return the flags of a configuration by field, in the order of its fields."""
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
    """Return the fields' values from parsed arguments, lists as tuples."""
    values = {item.name: getattr(args, item.name) for item in fields(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _add(group: argparse._ArgumentGroup, dest: str, declared: Flag, default: Any) -> None:
    option = declared.option(dest)
    settings: dict[str, Any] = {"help": declared.help, **declared.extra}
    if declared.parse is not None:
        settings |= {"type": declared.parse, "metavar": declared.metavar}
    if default is MISSING:
        either = group.add_mutually_exclusive_group(required=True)
        either.add_argument(dest, nargs="?", default=argparse.SUPPRESS, **settings)
        either.add_argument(option, **settings | {"help": f"another way to name {declared.metavar}"})
        return
    settings |= {"dest": dest, "default": list(default) if isinstance(default, tuple) else default}
    if declared.parse is None:
        settings["action"] = _switch(option, default)
    elif declared.help != argparse.SUPPRESS and default not in (None, ()):
        settings["help"] += f" (default: {declared.show(default)})"
    group.add_argument(option, **settings)


def _switch(option: str, default: bool) -> Any:
    """Choose how a switch acts: one that is on by default has a `--no-` form, or is called `--disable-…`."""
    if not default:
        return "store_true"
    return "store_false" if option.startswith("--disable-") else argparse.BooleanOptionalAction
