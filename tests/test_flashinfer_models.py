"""The FlashInfer backend against the reference: on the double everywhere, on FlashInfer itself where a GPU is."""

import numpy as np
import pytest
import torch

from tests.flashinfer_cases import (
    DOUBLE,
    GPU,
    NARROW,
    GpuRunner,
    Place,
    ReferenceRunner,
    Traffic,
    compare,
    config,
)
from tests.marks import mark_rest
from worker.models import FAMILIES

STEPS = 56  # for each of nine families, so more than 500 in all
SHOWN = ("prefix hit", "decode", "chunk after others", "whole prompt", "full last page", "new page", "mixed")
PLACES = [pytest.param(DOUBLE, id="double"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _needs_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")


@pytest.mark.parametrize("family", mark_rest(pytest.mark.emulation, sorted(FAMILIES), keep=3))
def test_bfloat16_is_close(family: str) -> None:
    """The dtype of a GPU: kernels take weights of the activations' dtype, and nothing is widened on the way."""
    with NARROW(seed=1):
        reference = ReferenceRunner(config(family, NARROW), NARROW.dtype)
        traffic = Traffic(np.random.default_rng(2))
        compare(reference, GpuRunner(reference), traffic, 6, NARROW.tolerance)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.emulation
def test_logits_are_the_references(place: Place, family: str) -> None:
    """Steps that mix prompts, chunks, prefix hits and decode rows; decode rows alone go behind padded graphs."""
    with place(seed=7):
        reference = ReferenceRunner(config(family, place), place.dtype)
        gpu = GpuRunner(reference)
        traffic = Traffic(np.random.default_rng(11))
        worst = compare(reference, gpu, traffic, STEPS, place.tolerance)
        assert worst > 0  # two computations, not one
        assert all(traffic.seen[kind] for kind in SHOWN), traffic.seen
