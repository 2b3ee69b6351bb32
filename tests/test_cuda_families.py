"""Every family on the emulated GPU: its layers must hold in a graph, and its tokens be the CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import prepare
from proto.messages import StepResult
from tests.cuda_cases import SIZES, ids_of, launch, script, silent
from tests.flashinfer_double import simulate
from tests.layer_cases import worker_options
from tests.marks import mark_rest
from tests.tiny_models import FAMILIES, NEWER_FAMILIES, make_tiny
from worker.cpu.start import start as start_cpu
from worker.cuda.start import start
from worker.device import Deferred


@pytest.mark.parametrize("family", mark_rest(pytest.mark.emulation, [*FAMILIES, *NEWER_FAMILIES]))
def test_tokens_are_the_cpus(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"window": 9} if family == "mistral" else {}
    manifest = prepare(str(make_tiny(tmp_path, family, **changes)))
    options = worker_options(manifest, device="reference", **SIZES)
    runner = start_cpu(options, silent)
    runner.reset(1)
    expected = [runner.step(plan) for plan in script(manifest.config)]
    with simulate(1) as gpu:
        device = start(worker_options(manifest, device="cuda", **SIZES), silent)
        device.reset(1)
        flight = [launch(gpu, device, plan) for plan in script(manifest.config)]
        for deferred, wanted in zip(flight, expected, strict=True):
            assert isinstance(deferred, Deferred)
            assert isinstance(wanted, StepResult)
            assert ids_of(deferred.wait()) == ids_of(wanted)
        assert bool(torch.isfinite(gpu.peek(device._step.logits)[:3]).all())
        assert device._graphs is not None
