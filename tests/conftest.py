"""Fixtures that several parts' tests share."""

import os

# As workers do, before anything loads torch: OpenMP that spins for milliseconds starves whatever shares the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Its handlers complain on stderr, which tests read, when a test forks after another has used gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest

from engine.models import prepare
from proto.model import ModelManifest


@pytest.fixture(scope="session")
def demo_manifest() -> ModelManifest:
    """The demo model, fetched into the user cache by the first test run on a machine."""
    return prepare("demo")
