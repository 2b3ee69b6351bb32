"""Fill every parameter of a model exactly once, or refuse with the whole list of what does not fit."""

from collections.abc import Callable

import torch

from proto.model import ModelManifest
from worker.layers.parameter import Parameter
from worker.loader.checkpoint import Checkpoint
from worker.loader.errors import LoadError
from worker.loader.gguf_checkpoint import GgufCheckpoint
from worker.loader.kv_scales import is_kv_scale
from worker.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker.models import FAMILIES

Progress = Callable[[str, int, int], None]

# Tensors that some files carry though the config says all there is to know: tables of RoPE frequencies.
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope_freqs.weight")
LISTED = 20  # names of each kind in an error


def load_checkpoint(manifest: ModelManifest, parameters: list[Parameter], progress: Progress) -> None:
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
        raise LoadError(f"{manifest.source}: holds no weights; --load-format dummy makes random ones")


def fill(
    checkpoint: Checkpoint,
    names: dict[str, str],
    parameters: list[Parameter],
    manifest: ModelManifest,
    progress: Progress,
    *,
    ignored: tuple[str, ...] = (),
    offsets: bool = False,
) -> None:
    """Check all names, shapes and dtypes first, then read.

    Names that start as one of `ignored` are left out. `offsets`: the files leave off the parameters' offsets.
    """
    sources = {parameter.name: _checkpoint_name(names, parameter.name) for parameter in parameters}
    passed_over = {name.format(layer) for name in IGNORED for layer in range(manifest.config.num_layers)}
    passed_over.update(name for name in checkpoint.tensors if name.startswith(ignored))
    passed_over.update(filter(is_kv_scale, checkpoint.tensors))  # read where they matter
    if manifest.config.tie_word_embeddings:
        passed_over.add(names["head.weight"])  # some files carry the tied head a second time
    _check(checkpoint, sources, passed_over, parameters, manifest)
    for done, parameter in enumerate(parameters):
        progress("loading weights", done, len(parameters))
        parameter.tensor.copy_(checkpoint.read(sources[parameter.name], parameter.share, parameter.dim))
        if offsets and parameter.offset:
            parameter.tensor.add_(parameter.offset)
    progress("loading weights", len(parameters), len(parameters))


def _with_root(names: dict[str, str], roots: tuple[tuple[str, str], ...], checkpoint: Checkpoint) -> dict[str, str]:
    """`names` as they are, or with the root under which this checkpoint has its embedding."""
    for usual, other in roots:
        renamed = {
            ours: other + theirs.removeprefix(usual) if theirs.startswith(usual) else theirs
            for ours, theirs in names.items()
        }
        if renamed["embedding.weight"] in checkpoint.tensors:
            return renamed
    return names


def _check(
    checkpoint: Checkpoint,
    sources: dict[str, str],
    ignored: set[str],
    parameters: list[Parameter],
    manifest: ModelManifest,
) -> None:
    wanted = set(sources.values())
    missing = [name for name in sources.values() if name not in checkpoint.tensors]
    unexpected = [name for name in checkpoint.tensors if name not in wanted and name not in ignored]
    mismatched = []
    for parameter in parameters:
        info = checkpoint.tensors.get(sources[parameter.name])
        shape = parameter.shape
        if info is not None and (info.shape != shape or not info.floating):
            mismatched.append(
                f"{sources[parameter.name]} (is {info.dtype} {list(info.shape)}, wanted a float {list(shape)})"
            )
    problems = [
        f"{kind}: {', '.join(found[:LISTED])}{f' and {len(found) - LISTED} more' if len(found) > LISTED else ''}"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        if found
    ]
    if problems:
        raise LoadError(f"{manifest.source}: tensors do not fit the model's config: {'; '.join(problems)}")


def _checkpoint_name(names: dict[str, str], name: str) -> str:
    """The checkpoint's spelling of one of our names, like "layers.3.mlp.experts.12.up.weight"."""
    parts = name.split(".")
    pattern = ".".join("{}" if part.isdecimal() else part for part in parts)
    return names[pattern].format(*(part for part in parts if part.isdecimal()))


def fill_dummy(parameters: list[Parameter], seed: int) -> None:
    """Random weights that keep activations in range: norms 1, the rest normal with deviation 0.02.

    A rank draws all and keeps its share, so that any number of ranks has the same model.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        share = parameter.share
        if parameter.name.endswith("norm.weight"):
            parameter.tensor.fill_(1)
        elif share is None or share.whole:
            parameter.tensor.normal_(0, 0.02, generator=generator)
        else:
            drawn = torch.empty(parameter.shape, dtype=parameter.tensor.dtype).normal_(0, 0.02, generator=generator)
            parameter.tensor.copy_(drawn.narrow(parameter.dim, share.start, share.size))
