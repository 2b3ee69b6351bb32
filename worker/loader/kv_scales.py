"""A checkpoint's own scales of K and V, for a cache in fp8: value = stored × scale."""

import re

from proto.model import ModelManifest
from worker.loader.errors import LoadError
from worker.loader.safetensors_checkpoint import SafetensorsCheckpoint

_NAME = re.compile(r"\blayers\.(?P<layer>\d+)\.self_attn\.(attn\.|k_proj\.|v_proj\.)?(?P<of>[kv])_scale$")


def is_kv_scale(name: str) -> bool:
    """Check whether a tensor is such a scale, in any of the spellings in use."""
    return _NAME.search(name) is not None


def kv_scales(manifest: ModelManifest) -> tuple[tuple[float, float], ...]:
    """(K, V) by layer; () if the files hold none.

    Raises LoadError when some layers lack them, and for one that is not a positive number.
    """
    if manifest.weight_format != "safetensors":
        return ()
    checkpoint = SafetensorsCheckpoint(manifest.weight_files)
    found: dict[tuple[int, str], float] = {}
    for name in checkpoint.tensors:
        if match := _NAME.search(name):
            scale = checkpoint.read(name).flatten().tolist()
            if len(scale) != 1 or not 0 < scale[0] < float("inf"):
                raise LoadError(f"{manifest.source}: {name} must be one positive number, is {scale}")
            found[int(match["layer"]), match["of"]] = scale[0]
    if not found:
        return ()
    layers = range(manifest.config.num_layers)
    if missing := [f"layer {layer} {of}" for layer in layers for of in "kv" if (layer, of) not in found]:
        raise LoadError(f"{manifest.source}: has K and V scales for some layers, but none for {', '.join(missing)}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in layers)
