"""Checkpoints of the newer families: other files' spellings, and every tensor exactly once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import prepare
from proto.model import ModelManifest
from tests.layer_cases import Player, load, prompt
from tests.tiny_models import NEWER_FAMILIES, make_tiny
from worker.loader import LoadError

IDS = prompt(20, 320, seed=1)
Change = Callable[[dict[str, torch.Tensor]], Any]


def rewrite(directory: Path, change: Change) -> ModelManifest:
    """Apply `change` to the dict of tensors, save, and read the manifest."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return prepare(str(directory))


def rename(rule: Callable[[str], str]) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        renamed = {rule(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return change


def logits(manifest: ModelManifest) -> torch.Tensor:
    return Player(load(manifest), 1, 64).run({0: (IDS, 0)}, every_token=True)


def test_bloom_under_the_names_of_its_makers(tmp_path: Path) -> None:
    """BigScience's files have no "transformer." in front."""
    directory = make_tiny(tmp_path, "bloom", tie=True)
    expected = logits(prepare(str(directory)))
    assert torch.equal(logits(rewrite(directory, rename(lambda n: n.removeprefix("transformer.")))), expected)


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_gemma_3_out_of_a_model_that_sees(tmp_path: Path, root: str) -> None:
    """The text part has its own names and config inside the whole; tensors of the vision tower are left alone."""
    directory = make_tiny(tmp_path, "gemma3", tie=True)
    expected = logits(prepare(str(directory)))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    dtype = config.pop("dtype")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": dtype, "text_config": config}
    path.write_text(json.dumps(whole))

    def as_part(tensors: dict[str, torch.Tensor]) -> None:
        rename(lambda name: root + name.removeprefix("model."))(tensors)
        tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(4, 4)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(4, 4)

    assert torch.equal(logits(rewrite(directory, as_part)), expected)


@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_a_stranger_and_a_missing_tensor_are_named(tmp_path: Path, family: str) -> None:
    manifest = prepare(str(make_tiny(tmp_path, family)))
    names = sorted(load_file(tmp_path / "model.safetensors"))
    lost = next(name for name in names if ".1." in name and name.endswith(".weight"))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["stranger.weight"] = tensors.pop(lost)

    manifest = rewrite(tmp_path, spoil)
    with pytest.raises(LoadError) as caught:
        load(manifest)
    assert f"missing: {lost}" in str(caught.value)
    assert "unexpected: stranger.weight" in str(caught.value)


def test_a_lost_expert_is_named(tmp_path: Path) -> None:
    name = "model.layers.2.block_sparse_moe.experts.4.w3.weight"
    manifest = rewrite(make_tiny(tmp_path, "mixtral"), lambda tensors: tensors.pop(name))
    with pytest.raises(LoadError, match=f"missing: {name}$"):
        load(manifest)


@pytest.mark.parametrize("family", NEWER_FAMILIES)
def test_dummy_weights_give_finite_logits(tmp_path: Path, family: str) -> None:
    manifest = prepare(str(make_tiny(tmp_path, family)))
    player = Player(load(manifest, load_format="dummy"), 1, 64)
    out = player.run({0: (IDS, 0)})
    assert torch.isfinite(out).all()
    assert out.std() > 1e-3
