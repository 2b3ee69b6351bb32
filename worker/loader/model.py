"""Build and fill a model on a device: its family, its dtype, its weights."""

import torch

from proto.config import WorkerOptions
from proto.model import ModelManifest
from worker.layers.ops import Ops
from worker.loader.errors import LoadError
from worker.loader.load import Progress, fill_dummy, load_checkpoint
from worker.models import FAMILIES
from worker.models.base import Model
from worker.ranks.group import Group


def resolve_dtype(wanted: str, checkpoint: str, instead: dict[str, str]) -> torch.dtype:
    """Return the dtype to compute in; "auto" is the checkpoint's own, or what `instead` names for it."""
    name = instead.get(checkpoint, checkpoint) if wanted == "auto" else wanted
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def build_model(
    manifest: ModelManifest, ops: Ops, dtype: torch.dtype, max_position: int, group: Group, device: str
) -> Model:
    """Return this rank's share of a model, its weights allocated on `device` but not filled. Raises LoadError."""
    family = manifest.config.family
    if family not in FAMILIES:
        raise LoadError(f"{manifest.source}: family {family!r} is not one of {', '.join(FAMILIES)}")
    try:
        with torch.device(device):
            return FAMILIES[family](manifest.config, ops, dtype=dtype, max_position=max_position, group=group)
    except ValueError as error:
        raise LoadError(f"{manifest.source}: {error}") from error


def load_model(
    options: WorkerOptions,
    ops: Ops,
    dtype: torch.dtype,
    max_position: int,
    progress: Progress,
    group: Group,
    device: str = "cpu",
) -> Model:
    """Return this rank's share of the model on `device`, filled and packed. Raises LoadError."""
    model = build_model(options.manifest, ops, dtype, max_position, group, device)
    if options.load_format == "dummy":
        fill_dummy(model.parameters(), options.seed)
    else:
        load_checkpoint(options.manifest, model.parameters(), progress)
    model.pack()
    return model
