"""Turn what the operator typed into a ModelManifest."""

import os
from pathlib import Path

from engine.models.demo import fetch_demo
from engine.models.errors import ModelError
from engine.models.fields import read_json
from engine.models.gguf_model import read_gguf_config, read_gguf_model
from engine.models.hf_config import model_config
from engine.models.hf_directory import read_directory
from engine.models.hub import fetch_from_hub, is_hub_name
from engine.models.progress import Progress, silent
from proto.model import ModelConfig, ModelManifest


def prepare(name: str, *, weights_needed: bool = True, progress: Progress = silent) -> ModelManifest:
    """Find, fetch and read a model; torch-free.

    `name` is a directory in Hugging Face's layout, a .gguf file, "demo", org/name on the Hugging Face hub
    or, without weights, a config.json. Without weights, a model that has no tokenizer.json gets a
    synthetic tokenizer. Raises ModelError.
    """
    try:
        return _read(name, _locate(name, progress, weights_needed=weights_needed), weights_needed=weights_needed)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or name}: {error.strerror}") from error


def _read(name: str, path: Path, *, weights_needed: bool) -> ModelManifest:
    if path.is_dir():
        return read_directory(name, path / "config.json", weights_needed=weights_needed)
    if path.suffix == ".gguf":
        return read_gguf_model(name, path, weights_needed=weights_needed)
    if weights_needed:
        raise ModelError(f"{path} is a config without weights; give the directory that holds both")
    return read_directory(name, path, weights_needed=False)


def read_config(name: str, progress: Progress = silent) -> ModelConfig:
    """Read only the shape of a model, named as for `prepare`. Raises ModelError."""
    path = _locate(name, progress, weights_needed=False)
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf_config(path)
    return model_config(read_json(path / "config.json" if path.is_dir() else path), None)


def _locate(name: str, progress: Progress, *, weights_needed: bool) -> Path:
    """Return a directory, a .gguf file or a .json file that exists."""
    if name == "demo":
        return fetch_demo(progress)
    path = Path(os.path.expanduser(name)).absolute()
    if path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".json")):
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a directory, a .gguf file nor a config.json")
    if is_hub_name(name) and path.suffix not in (".gguf", ".json"):
        return fetch_from_hub(name, progress, weights_needed=weights_needed)
    raise ModelError(
        f"no model {name!r}: {path} does not exist, and it is neither 'demo' nor of the form org/name for the hub"
    )
