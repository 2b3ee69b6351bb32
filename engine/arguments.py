"""Types of command-line arguments: each parses a text, or says what it must be and what it got."""

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ArgumentTypeError(f"must be {bounds}, got {value}")
        return value

    return parse


def number(least: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """Return the type of finite numbers from `least` to `most`, all of them above 0."""
    bounds = f"at least {least:g}" if least else "above 0"
    if most < math.inf:
        bounds += f" and at most {most:.15g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf and least <= value <= most):
            raise ArgumentTypeError(f"must be a number {bounds}, got {text!r}")
        return value

    return parse


def size(least: int = 1) -> Callable[[str], int]:
    """Return the type of byte counts: "24GiB" (2^30), "80GB" (10^9), "512m" (as MiB, like vLLM's flags) or a number."""

    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ArgumentTypeError(f"must be a size such as 512MiB, 80GB or a number of bytes, got {text!r}")
        value = int(Fraction(match[1]) * _UNITS[match[2]])
        if value < least:
            raise ArgumentTypeError(f"must be at least {size_text(least)}, got {text!r}")
        return value

    return parse


def size_text(value: int) -> str:
    """Write a byte count as `size` reads it, in the largest unit that divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _UNITS[unit.lower()] == 0:
            return f"{value // _UNITS[unit.lower()]}{unit}"
    return f"{value}B"


def choice(values: Mapping[str, str]) -> Callable[[str], str]:
    """Return the type of texts that name one of `values`, synonyms included."""

    def parse(text: str) -> str:
        if text not in values:
            raise ArgumentTypeError(f"must be one of {', '.join(values)}; got {text!r}")
        return values[text]

    return parse


def only(value: T, feature: str) -> Callable[[str], T]:
    """Return the type of a flag whose feature is not built yet, which accepts only the value that changes nothing."""

    def parse(text: str) -> T:
        if text.lower() != str(value):
            raise ArgumentTypeError(f"{feature} is not built yet: must be {value}, got {text}")
        return value

    return parse


def nonempty(text: str) -> str:
    """Parse a text that is not empty."""
    if not text:
        raise ArgumentTypeError("must not be empty")
    return text


def host_port(text: str) -> str:
    """Parse the address of a server."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ArgumentTypeError(f"must be HOST:PORT with a port between 1 and 65535, got {text!r}")
    return text


def explained(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the type that `parse` makes of a text, for a function that raises ValueError or OSError."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except (ValueError, OSError) as error:
            raise ArgumentTypeError(str(error)) from None

    return parse_argument


def output_file(text: str) -> Path:
    """Parse the path of a file to write, so that a bad one is refused before the work and not after it."""
    path = Path(text)
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ArgumentTypeError(f"cannot write to {text!r}")
    return path
