"""Fixtures that several parts' tests share."""

import os

# As workers do, before anything loads torch: OpenMP that spins for milliseconds starves whatever shares the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Its handlers complain on stderr, which tests read, when a test forks after another has used gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from engine.models import prepare
from proto.model import ModelManifest

if TYPE_CHECKING:
    from tests.flashinfer_double import Gpu


@pytest.fixture(scope="session")
def demo_manifest() -> ModelManifest:
    """The demo model, fetched into the user cache by the first test run on a machine."""
    return prepare("demo")


@pytest.fixture
def gpu() -> "Iterator[Gpu]":
    """An emulated GPU, with the emulated libraries in the places of the real ones."""
    from tests.flashinfer_double import simulate

    with simulate(0) as simulated:
        yield simulated
