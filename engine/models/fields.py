"""Typed access to a parsed document, with errors that name file and key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.models.errors import ModelError

_REQUIRED: Any = object()


class Fields:
    """A mapping read from `path`. Getters raise ModelError on a missing key or a value of the wrong kind.

    A null value counts as absent, as in Hugging Face's configs.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.prefix}{key} {problem}")

    def integer(self, key: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, is {value!r}")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}, is {value}")
        return value

    def number(self, key: str, default: float = _REQUIRED, *, above: float = 0.0) -> float:
        """Return a finite number greater than `above`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, is {value!r}")
        if value <= above:
            raise self.error(key, f"must be greater than {above:g}, is {value}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        values = self._get(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"must be a list of {count} numbers, is {values!r}")
        each = Fields(self.path, {f"{key}[{at}]": value for at, value in enumerate(values)}, self.prefix)
        return tuple(each.number(name) for name in each.values)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {value!r}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Return one token id, a list of them, or none."""
        value = self._get(key, ())
        ids = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(key, f"must be a token id or a list of them, is {value!r}")
        return tuple(ids)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(key, "is missing")
        return default


def read_json(path: Path) -> Fields:
    """Parse a JSON object. Raises ModelError naming the file."""
    try:
        values = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not a JSON object")
    return Fields(path, values)


def read_json_if_there(path: Path) -> Fields:
    """Like `read_json`; a file that does not exist reads as an empty object."""
    return read_json(path) if path.exists() else Fields(path, {})
