"""Fixtures that several parts' tests share."""

import pytest

from engine.models import prepare
from proto.model import ModelManifest


@pytest.fixture(scope="session")
def demo_manifest() -> ModelManifest:
    """The demo model, fetched into the user cache by the first test run on a machine."""
    return prepare("demo")
