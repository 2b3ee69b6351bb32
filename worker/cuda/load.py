"""Weights into device memory."""

from dataclasses import replace

import torch

from proto.config import WorkerOptions
from proto.model import ModelManifest
from worker.cuda.ops import CudaOps
from worker.device import DeviceError
from worker.loader.errors import LoadError
from worker.loader.load import Progress, fill_dummy, load_checkpoint
from worker.models import FAMILIES
from worker.models.base import Model
from worker.ranks.group import Group

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def require_cuda(workers: int = 1) -> None:
    """Raises DeviceError, naming what this machine lacks to give each of so many workers a GPU."""
    if not torch.cuda.is_available():
        lack = "this torch was built for CPUs only" if torch.version.cuda is None else "no GPU or no driver for it"
        raise DeviceError(f"--device cuda: {lack}; `quintet doctor` lists what is missing")
    if (gpus := torch.cuda.device_count()) < workers:
        raise DeviceError(
            f"{workers} workers (--tensor-parallel-size times --data-parallel-size) need a GPU each, and {gpus} can be "
            "seen here (CUDA_VISIBLE_DEVICES hides others)"
        )


def resolve_dtype(wanted: str, checkpoint: str) -> torch.dtype:
    """The dtype to compute in. "auto" is the checkpoint's own, and bfloat16 for float32. Raises DeviceError."""
    if wanted == "auto":
        return DTYPES[checkpoint] if checkpoint in ("bfloat16", "float16") else torch.bfloat16
    if wanted not in DTYPES:
        raise DeviceError(f"--dtype {wanted} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


def resolve_kv_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of K and V in memory, beside activations of `dtype`. Raises DeviceError."""
    if wanted == "auto":
        return dtype
    if wanted == "fp8_e4m3":
        return torch.float8_e4m3fn
    raise DeviceError(f"--kv-cache-dtype {wanted} is neither auto nor fp8_e4m3")


def load_model(
    options: WorkerOptions, dtype: torch.dtype, max_position: int, progress: Progress, group: Group
) -> Model:
    """This rank's share of the model on the current device, filled and packed. Raises LoadError."""
    manifest = options.manifest
    model = _build(manifest, CudaOps(deterministic=options.deterministic), dtype, max_position, group)
    if options.load_format == "dummy":
        _fill_dummy(model, options.seed)
    else:
        load_checkpoint(manifest, model.parameters(), progress)
    model.pack()
    return model


def _build(manifest: ModelManifest, ops: CudaOps, dtype: torch.dtype, max_position: int, group: Group) -> Model:
    family = manifest.config.family
    if family not in FAMILIES:
        raise LoadError(f"{manifest.source}: family {family!r} is not one of {', '.join(FAMILIES)}")
    try:
        with torch.device("cuda"):
            return FAMILIES[family](manifest.config, ops, dtype=dtype, max_position=max_position, group=group)
    except ValueError as error:
        raise LoadError(f"{manifest.source}: {error}") from error


def _fill_dummy(model: Model, seed: int) -> None:
    """The random weights that the CPU would get: drawn there, since a GPU's generator gives others."""
    places = model.parameters()
    drawn = {
        path: replace(place, tensor=torch.empty(place.tensor.shape, dtype=place.tensor.dtype))
        for path, place in places.items()
    }
    fill_dummy(drawn, seed)
    for path, place in places.items():
        place.tensor.copy_(drawn[path].tensor)
