"""Fill every parameter of a model exactly once, or refuse with the whole list of what does not fit."""

from collections.abc import Callable

import torch

from proto.model import ModelManifest
from worker.layers.parameter import Parameter
from worker.loader.checkpoint import Checkpoint
from worker.loader.errors import LoadError
from worker.loader.gguf_checkpoint import GgufCheckpoint
from worker.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker.models.llama import GGUF_NAMES, HUGGING_FACE_NAMES

Progress = Callable[[str, int, int], None]

# Tensors that some files carry though the config says all there is to know: tables of RoPE frequencies.
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope_freqs.weight")
LISTED = 20  # names of each kind in an error


def load_checkpoint(manifest: ModelManifest, parameters: list[Parameter], progress: Progress) -> None:
    """Read the manifest's files into `parameters`, casting between float dtypes. Raises LoadError."""
    config = manifest.config
    if manifest.weight_format == "safetensors":
        fill(SafetensorsCheckpoint(manifest.weight_files), HUGGING_FACE_NAMES, parameters, manifest, progress)
    elif manifest.weight_format == "gguf":
        checkpoint = GgufCheckpoint(manifest.weight_files, config.num_heads, config.num_kv_heads)
        fill(checkpoint, GGUF_NAMES, parameters, manifest, progress)
    else:
        raise LoadError(f"{manifest.source}: holds no weights; --load-format dummy makes random ones")


def fill(
    checkpoint: Checkpoint,
    names: dict[str, str],
    parameters: list[Parameter],
    manifest: ModelManifest,
    progress: Progress,
) -> None:
    """Check all names, shapes and dtypes first, then read."""
    sources = {parameter.name: _checkpoint_name(names, parameter.name) for parameter in parameters}
    ignored = {name.format(layer) for name in IGNORED for layer in range(manifest.config.num_layers)}
    if manifest.config.tie_word_embeddings:
        ignored.add(names["head.weight"])  # some files carry the tied head a second time
    _check(checkpoint, sources, ignored, parameters, manifest)
    for done, parameter in enumerate(parameters):
        progress("loading weights", done, len(parameters))
        parameter.tensor.copy_(checkpoint.read(sources[parameter.name]))
    progress("loading weights", len(parameters), len(parameters))


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
        shape = tuple(parameter.tensor.shape)
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
    """The checkpoint's spelling of one of our names, like "layers.3.mlp_norm.weight"."""
    parts = name.split(".")
    if parts[0] != "layers":
        return names[name]
    return names[".".join(["layers", "{}", *parts[2:]])].format(parts[1])


def fill_dummy(parameters: list[Parameter], seed: int) -> None:
    """Random weights that keep activations in range: norms 1, the rest normal with deviation 0.02."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if "norm" in parameter.name:
            parameter.tensor.fill_(1)
        else:
            parameter.tensor.normal_(0, 0.02, generator=generator)
