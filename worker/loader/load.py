"""Fill every parameter of a model exactly once, or refuse with a list of everything that does not fit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from proto.division import Share
from proto.model import ModelManifest
from worker.layers.parameter import Parameter
from worker.loader.checkpoint import Checkpoint
from worker.loader.errors import LoadError
from worker.loader.gguf_checkpoint import GgufCheckpoint
from worker.loader.kv_scales import is_kv_scale
from worker.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker.models import FAMILIES

Progress = Callable[[str, int, int], None]

# RoPE frequencies that some files carry, although the config says all there is to know.
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope_freqs.weight")
LISTED = 20  # names of each kind in an error


def load_checkpoint(manifest: ModelManifest, parameters: dict[str, Parameter], progress: Progress) -> None:
    """Read the manifest's files into `parameters`, casting between float dtypes. Raises LoadError."""
    config = manifest.config
    family = FAMILIES[config.family]
    if manifest.weight_format == "safetensors":
        checkpoint: Checkpoint = SafetensorsCheckpoint(manifest.weight_files)
        names = _with_root(family.hugging_face_names, family.hugging_face_roots, checkpoint)
        fill(checkpoint, names, parameters, manifest, progress, ignored=family.hugging_face_ignored, offsets=True)
    elif manifest.weight_format == "gguf":
        if not family.gguf_names:
            raise LoadError(f"{manifest.source}: GGUF files of family {config.family} are not supported")
        checkpoint = GgufCheckpoint(manifest.weight_files, config.num_heads, config.num_kv_heads)
        fill(checkpoint, family.gguf_names, parameters, manifest, progress)
    else:
        raise LoadError(f"{manifest.source}: has no weights; use --load-format dummy for random ones")


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the checkpoint, and what this rank reads of it: a share along `dim` (None = all) into each place."""

    name: str
    shape: tuple[int, ...]
    dim: int
    reads: list[tuple[Share | None, torch.Tensor]]
    offset: float


def fill(
    checkpoint: Checkpoint,
    names: dict[str, str],
    parameters: dict[str, Parameter],
    manifest: ModelManifest,
    progress: Progress,
    *,
    ignored: tuple[str, ...] = (),
    offsets: bool = False,
) -> None:
    """Check all names, shapes and dtypes first, then read.

    Names that start with one of `ignored` are left out. `offsets`: the files leave off the parameters' offsets.
    """
    sources = [source for path, parameter in parameters.items() for source in _sources(names, path, parameter)]
    passed_over = {name.format(layer) for name in IGNORED for layer in range(manifest.config.num_layers)}
    passed_over.update(name for name in checkpoint.tensors if name.startswith(ignored))
    passed_over.update(filter(is_kv_scale, checkpoint.tensors))  # read where they matter
    if manifest.config.tie_word_embeddings:
        passed_over.add(f"{names['head']}.weight")  # some files carry the tied head a second time
    _check(checkpoint, sources, passed_over, manifest)
    for done, source in enumerate(sources):
        progress("loading weights", done, len(sources))
        for share, place in source.reads:
            place.copy_(checkpoint.read(source.name, share, source.dim))
            if offsets and source.offset:
                place.add_(source.offset)
    progress("loading weights", len(sources), len(sources))


def _with_root(names: dict[str, str], roots: tuple[tuple[str, str], ...], checkpoint: Checkpoint) -> dict[str, str]:
    """Return `names` as they are, or with the root under which this checkpoint has its embedding."""
    for usual, other in roots:
        renamed = {
            ours: other + theirs.removeprefix(usual) if theirs.startswith(usual) else theirs
            for ours, theirs in names.items()
        }
        if f"{renamed['embedding']}.weight" in checkpoint.tensors:
            return renamed
    return names


def _sources(names: dict[str, str], path: str, parameter: Parameter) -> list[_Source]:
    """Find a parameter in a checkpoint with these names: one tensor, or one for each map that it merges."""
    module, _, leaf = path.rpartition(".")
    dim, offset = parameter.dim, parameter.offset
    if (theirs := _checkpoint_name(names, module)) is not None:
        reads: list[tuple[Share | None, torch.Tensor]] = [(None, parameter.tensor)]
        if parameter.parts:
            reads = [(merged, place) for _, _, merged, place in parameter.slices()]
        return [_Source(f"{theirs}.{leaf}", parameter.shape, dim, reads, offset)]
    found = []
    for part, share, _, place in parameter.slices():
        shape = (*place.shape[:dim], share.total, *place.shape[dim + 1 :])
        ours = f"{module}.{part}"
        name = _checkpoint_name(names, ours) or ours  # a name that is lacking is reported as a missing tensor
        found.append(_Source(f"{name}.{leaf}", shape, dim, [(share, place)], offset))
    return found


def _check(checkpoint: Checkpoint, sources: list[_Source], ignored: set[str], manifest: ModelManifest) -> None:
    wanted = {source.name for source in sources}
    missing = [source.name for source in sources if source.name not in checkpoint.tensors]
    unexpected = [name for name in checkpoint.tensors if name not in wanted and name not in ignored]
    mismatched = []
    for source in sources:
        info = checkpoint.tensors.get(source.name)
        if info is not None and (info.shape != source.shape or not info.floating):
            mismatched.append(
                f"{source.name} (is {info.dtype} {list(info.shape)}, wanted a float {list(source.shape)})"
            )
    problems = [
        f"{kind}: {', '.join(found[:LISTED])}{f' and {len(found) - LISTED} more' if len(found) > LISTED else ''}"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        if found
    ]
    if problems:
        raise LoadError(f"{manifest.source}: tensors do not fit the model's config: {'; '.join(problems)}")


def _checkpoint_name(names: dict[str, str], path: str) -> str | None:
    """Return the checkpoint's name for a part of the model, like "layers.3.mlp.down"; None if `names` has none."""
    parts = path.split(".")
    theirs = names.get(".".join("{}" if part.isdecimal() else part for part in parts))
    return None if theirs is None else theirs.format(*(part for part in parts if part.isdecimal()))


def fill_dummy(parameters: dict[str, Parameter], seed: int) -> None:
    """Fill in random weights that keep activations in range: norms 1, the rest normal with deviation 0.02.

    They are drawn on the host, since a GPU's generator gives others, and a rank draws all and keeps its share: so any
    number of ranks on any device has the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in parameters.items():
        if path.endswith("norm.weight"):
            parameter.tensor.fill_(1)
            continue
        drawn = torch.empty(parameter.shape, dtype=parameter.tensor.dtype)
        parameter.copy_from(drawn.normal_(0, 0.02, generator=generator))
