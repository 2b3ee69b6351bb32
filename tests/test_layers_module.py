"""What a model says of itself by walking its attributes: parameters by path, and the matrix products of a step."""

from pathlib import Path

import pytest
import torch

from engine.models import prepare
from proto.division import Share
from tests.layer_cases import Player, load, prompt
from tests.tiny_models import FAMILIES as OLDER
from tests.tiny_models import NEWER_FAMILIES, make_tiny
from worker.cpu.reference_ops import ReferenceOps
from worker.layers.embedding import Embedding, Head
from worker.layers.gemm_shape import GemmShape
from worker.layers.linear import Linear, RowLinear
from worker.layers.module import Module, Target
from worker.layers.parameter import Parameter
from worker.models import FAMILIES
from worker.ranks.group import ALONE, Group

TARGET = Target(ReferenceOps(), ALONE, torch.float32)


class Block(Module):
    def __init__(self) -> None:
        self.scale = Parameter(torch.ones(3))
        self.up = Linear(TARGET, 3, Share(0, 4, 4), bias=True)
        self.note = "ignored"


class Whole(Module):
    def __init__(self, *, tied: bool) -> None:
        self.embedding = Embedding(TARGET, 5, 3)
        self.blocks = [Block(), Block()]
        self.head = Head(TARGET, 5, 3, tied=self.embedding if tied else None)


def test_paths_name_parameters_and_a_tied_one_has_one_name() -> None:
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in ("scale", "up.weight", "up.bias")]
    assert list(Whole(tied=True).parameters()) == ["embedding.weight", *blocks]
    assert list(Whole(tied=False).parameters()) == ["embedding.weight", *blocks, "head.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_packing_frees_what_the_device_has_a_copy_of(tied: bool) -> None:
    whole = Whole(tied=tied)
    whole.pack()
    sizes = {path: parameter.tensor.numel() for path, parameter in whole.parameters().items()}
    assert [path for path, size in sizes.items() if not size] == [
        "blocks.0.up.weight",
        "blocks.1.up.weight",
        *([] if tied else ["head.weight"]),
    ]


def test_a_rank_takes_its_share_of_each_merged_map() -> None:
    """Rows 0 to 3 are q, of which rank 1 has the last two; 4 is k, copied to both; 5 to 7 are v, of unequal shares."""
    whole = torch.arange(8.0)[:, None].expand(8, 2)
    parts = {"q": Share(2, 2, 4), "k": Share(0, 1, 1), "v": Share(1, 2, 3)}
    rows = Parameter(torch.empty(5, 2), parts)
    rows.copy_from(whole)
    assert rows.tensor[:, 0].tolist() == [2, 3, 4, 6, 7]
    assert rows.shape == (8, 2)
    assert [(name, merged.start) for name, _, merged, _ in rows.slices()] == [("q", 2), ("k", 4), ("v", 6)]
    columns = Parameter(torch.empty(2, 5), parts, dim=1)
    columns.copy_from(whole.T)
    assert torch.equal(columns.tensor, rows.tensor.T)


def test_linear_maps_know_their_shapes() -> None:
    group = Group(0, 2)
    target = Target(ReferenceOps(), group, torch.bfloat16)
    part = group.share(6)
    assert Linear(target, 10, {"a": part, "b": part}).gemm_shapes(7, 2) == [GemmShape(6, 10, torch.bfloat16, 7)]
    assert RowLinear(target, part, 10).gemm_shapes(7, 2) == [GemmShape(10, 3, torch.bfloat16, 7)]
    assert Head(target, 4, 10, tied=None).gemm_shapes(7, 2) == [GemmShape(2, 10, torch.float32, 2)]


@pytest.mark.parametrize("family", [*OLDER, *NEWER_FAMILIES])
def test_the_shapes_collected_are_those_of_the_products_made(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = prepare(str(make_tiny(tmp_path, family)))
    made: set[tuple[int, int, torch.dtype]] = set()
    plain = ReferenceOps.linear

    def recorded(ops: ReferenceOps, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        made.add((*packed.shape, x.dtype))
        return plain(ops, x, packed)

    monkeypatch.setattr(ReferenceOps, "linear", recorded)
    player = Player(load(manifest, device="reference", dtype="bfloat16"), 1, 48)
    player.run({0: (prompt(40, 320, seed=1), 0)})
    with torch.device("meta"):
        model = FAMILIES[family](manifest.config, ReferenceOps(), dtype=torch.bfloat16, max_position=1)
    shapes = model.gemm_shapes(64, 4)
    assert {(shape.out_features, shape.in_features, shape.dtype) for shape in shapes} == made
    assert {shape.rows for shape in shapes} == {64, 4}
