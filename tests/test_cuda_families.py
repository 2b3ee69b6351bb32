"""Every family on the emulated GPU: its layers must hold in a graph, and its tokens be the CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import prepare
from proto.cache import CacheGroups
from proto.messages import StepPlan, StepResult
from proto.model import ModelConfig
from tests.builders import i32, make_plan, make_row
from tests.flashinfer_double import simulate
from tests.layer_cases import worker_options
from tests.test_cuda_device import ids_of, launch, silent
from tests.test_worker_tables import behind_window
from tests.tiny_models import FAMILIES, NEWER_FAMILIES, make_tiny
from worker.cpu.start import start as start_cpu
from worker.cuda.start import start
from worker.device import Deferred

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 24,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "max_model_len": 96,
}


def script(config: ModelConfig) -> list[StepPlan]:
    """Two rows in a bucket of three, over the border of a page; a chunk beside decode rows."""
    groups = CacheGroups.of(config, 16, config.kv_bytes_per_token(4), SIZES["max_model_len"])
    return [behind_window(p, groups.window, not groups.full_layers) if groups.window else p for p in _script()]


def _script() -> list[StepPlan]:
    first, second = list(range(1, 14)), list(range(2, 17))
    late = make_row(2, list(range(40, 60)), [12, 13, 14])
    admits = (make_row(0, first, [0, 1, 2]), make_row(1, second, [4, 5, 6]))
    return [
        make_plan(admits=admits, chunks=i32(0, 13, 1, 1, 15, 1)),
        make_plan(step=2, decode_slots=i32(0, 1)),
        make_plan(step=3),
        make_plan(step=4, admits=(late,), chunks=i32(2, 20, 1)),
        make_plan(step=5, decode_slots=i32(2, 0, 1)),
        make_plan(step=6),
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER_FAMILIES])
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
