"""How tests are marked for `scripts/test --fast`."""

from collections.abc import Iterable
from typing import Any

import pytest


def mark_rest(mark: pytest.MarkDecorator, cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """Cases for `parametrize`, of which all but the first `keep` carry the mark."""
    found = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=mark if number >= keep else ()))
    return found
