"""Random events with full checks; `python -m tests.scheduler_fuzz` runs the million."""

import pytest

from tests.marks import mark_rest
from tests.scheduler_fuzz import SETTINGS, Setting, fuzz


@pytest.mark.parametrize("setting", mark_rest(pytest.mark.slow, SETTINGS, keep=8), ids=str)
def test_random_events_leave_nothing_wrong_and_nothing_behind(setting: Setting) -> None:
    run = fuzz(5_000, seed=11, setting=setting)
    assert run.finished > 100


def test_equal_seeds_give_equal_plans() -> None:
    setting = Setting(depth=2, pages=40, optimistic=True)
    assert fuzz(2_000, 5, setting).digest.digest() == fuzz(2_000, 5, setting).digest.digest()
    assert fuzz(2_000, 5, setting).digest.digest() != fuzz(2_000, 6, setting).digest.digest()
