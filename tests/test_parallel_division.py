"""How a model is divided between ranks: shares, their loading, and what is refused. One process."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from engine.config import ServeConfig
from engine.documents import kv_bytes
from engine.models import prepare
from engine.parallel import refuse_division
from proto.cache import CacheGroups
from proto.config import WorkerOptions
from proto.division import Share
from proto.model import ModelConfig, ModelManifest
from tests.builders import make_model
from tests.layer_cases import worker_options
from tests.tiny_models import FAMILIES as OLDER
from tests.tiny_models import NEWER_FAMILIES, make_tiny
from worker.cpu.pool import pool_pages
from worker.cpu.reference_ops import ReferenceOps
from worker.device import DeviceError, wanted_length
from worker.layers.attention import AttentionShape, alibi_slopes
from worker.layers.parameter import Parameter
from worker.loader.gguf_checkpoint import GgufCheckpoint
from worker.loader.load import load_checkpoint
from worker.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker.models import FAMILIES
from worker.ranks.group import ALONE, Group

Type: Any = gguf.GGMLQuantizationType


def loaded(manifest: ModelManifest, group: Group) -> dict[str, Parameter]:
    model = FAMILIES[manifest.config.family](
        manifest.config, ReferenceOps(), dtype=torch.float32, max_position=64, group=group
    )
    found = model.parameters()
    for parameter in found.values():
        parameter.tensor.fill_(torch.nan)
    load_checkpoint(manifest, found, lambda text, done, total: None)
    return found


@pytest.mark.parametrize("family", [*OLDER, *NEWER_FAMILIES])
def test_ranks_shares_put_together_are_the_whole_checkpoint(tmp_path: Path, family: str) -> None:
    manifest = prepare(str(make_tiny(tmp_path, family)))
    whole = loaded(manifest, ALONE)
    ranks = [loaded(manifest, Group(rank, 2)) for rank in range(2)]
    split = 0
    for name, parameter in whole.items():
        parts = [rank[name] for rank in ranks]
        if not parameter.parts:
            assert all(torch.equal(part.tensor, parameter.tensor) for part in parts), name
            continue
        split += parameter.tensor.numel()
        slices = [{part: place for part, _, _, place in rank[name].slices()} for rank in ranks]
        for part, _, _, place in parameter.slices():
            together = torch.cat([each[part] for each in slices], parameter.dim)
            assert torch.equal(together, place), f"{name} {part}"
    assert split > 0.9 * sum(parameter.tensor.numel() for parameter in whole.values())  # but for norms and routers


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Of each map that a fused tensor merges, too."""
    manifest = prepare(str(make_tiny(tmp_path, family)))
    read: list[int] = []
    plain = SafetensorsCheckpoint.read

    def counted(checkpoint: SafetensorsCheckpoint, name: str, share: Share | None = None, dim: int = 0) -> torch.Tensor:
        tensor = plain(checkpoint, name, share, dim)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    parameters = loaded(manifest, Group(1, 2))
    assert sum(read) == sum(parameter.tensor.numel() for parameter in parameters.values())


def test_a_tensor_of_another_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    manifest = prepare(str(make_tiny(tmp_path, "llama")))
    config = msgspec.structs.replace(manifest.config, intermediate_size=224)  # of which a share would fit the file
    for rank in range(2):
        with pytest.raises(Exception, match=r"mlp.down_proj.weight \(is F32 \[96, 112\], wanted a float \[96, 224\]\)"):
            loaded(msgspec.structs.replace(manifest, config=config), Group(rank, 2))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(("rows", "columns"), [(Share(2, 4, 6), None), (None, Share(192, 192, 512))])
def test_parts_of_quantised_tensors(tmp_path: Path, kind: str, rows: Share | None, columns: Share | None) -> None:
    """Rows, and columns that begin and end within a block of 256."""
    elements, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    rng = np.random.default_rng(0)
    data: Any
    if kind in ("F32", "F16"):
        data = rng.standard_normal((6, 512)).astype(np.float32 if kind == "F32" else np.float16)
    else:
        data = rng.integers(0, 56, (6, 512 // elements * size), dtype=np.uint8)
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint((str(path),), 4, 2)
    expected = dequantize(data, Type[kind]).astype(np.float32)
    if rows is not None:
        found, wanted = checkpoint.read("blk.0.ffn_up.weight", rows, 0), expected[rows.start : rows.stop]
    else:
        assert columns is not None
        found, wanted = checkpoint.read("blk.0.ffn_up.weight", columns, 1), expected[:, columns.start : columns.stop]
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize(("name", "heads"), [("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)])
def test_heads_of_llamas_gguf_files_are_put_in_order_share_by_share(tmp_path: Path, name: str, heads: int) -> None:
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, np.arange(heads * 8 * 3, dtype=np.float32).reshape(heads * 8, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint((str(path),), 4, 2)
    shares = [Group(rank, 2).share(heads).times(8) for rank in range(2)]
    assert torch.equal(torch.cat([checkpoint.read(name, share, 0) for share in shares]), checkpoint.read(name))


def test_kv_heads_are_copied_where_ranks_are_more() -> None:
    copied = [Group(rank, 4).share_heads(shape(num_heads=8, num_kv_heads=2)) for rank in range(4)]
    assert [(heads.start, heads.size, kv.start, kv.size) for heads, kv in copied] == [
        (0, 2, 0, 1),
        (2, 2, 0, 1),
        (4, 2, 1, 1),
        (6, 2, 1, 1),
    ]
    with pytest.raises(ValueError, match="6 heads on 3 KV heads cannot be shared by 4 ranks"):
        Group(0, 4).share_heads(shape(num_heads=6, num_kv_heads=3))


def test_query_heads_stay_with_the_kv_head_that_they_read() -> None:
    uneven = [Group(rank, 2).share_heads(shape(num_heads=9, num_kv_heads=3)) for rank in range(2)]
    assert uneven == [(Share(0, 3, 9), Share(0, 1, 3)), (Share(3, 6, 9), Share(1, 2, 3))]


def test_slopes_are_those_of_the_ranks_own_heads() -> None:
    shape = AttentionShape(1, 3, 3, 8, (), 16, 4, torch.float32, 1.0, alibi=True, heads=Share(3, 3, 6))
    assert shape.slopes().tolist() == alibi_slopes(6)[3:].tolist() != alibi_slopes(3).tolist()


def shape(**changes: Any) -> ModelConfig:
    sizes = {"num_heads": 6, "num_kv_heads": 2, "intermediate_size": 112, "vocab_size": 320, "expert_size": 40}
    return make_model(**(sizes | changes))


@pytest.mark.parametrize(
    ("config", "ranks", "text"),
    [
        (shape(), 1, ""),
        (shape(), 2, ""),
        (shape(num_heads=8, num_kv_heads=2), 8, ""),
        (shape(num_heads=9, num_kv_heads=3), 2, ""),
        (
            shape(),
            4,
            "--tensor-parallel-size 4 does not divide this model's attention heads (6, on 2 KV heads); "
            "sizes that do: 1, 2",
        ),
        (
            shape(num_heads=9, num_kv_heads=3, vocab_size=321, expert_size=3),
            4,
            "--tensor-parallel-size 4 does not divide this model's attention heads (9, on 3 KV heads) and "
            "vocabulary (321) and expert size (3); sizes that do: 1, 3",
        ),
    ],
    ids=["one", "two", "copied", "unequal", "heads", "several"],
)
def test_what_cannot_be_divided_is_named_with_what_can(config: ModelConfig, ranks: int, text: str) -> None:
    assert refuse_division(config, ranks) == text


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (12, 3), (8, 1)])
def test_what_is_not_refused_can_be_divided(ranks: int, heads: tuple[int, int]) -> None:
    """The supervisor's rule and the worker's say the same."""
    config = shape(num_heads=heads[0], num_kv_heads=heads[1], intermediate_size=96, vocab_size=240, expert_size=0)
    try:
        for rank in range(ranks):
            Group(rank, ranks).shape(config)
        possible = True
    except ValueError:
        possible = False
    assert possible is (refuse_division(config, ranks) == "")


def test_an_instance_has_a_worker_for_each_rank() -> None:
    config = ServeConfig(model="m", tensor_parallel_size=2)
    workers = [address for address in config.addresses if str(address).startswith("worker")]
    assert [address.title for address in workers] == [
        "quintet worker 0 rank 0",
        "quintet worker 0 rank 1",
    ]
    alone = kv_bytes(ServeConfig(model="m"))
    assert alone is not None
    assert kv_bytes(config) == pytest.approx(alone / 2, rel=0.1)


def test_ranks_share_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.cpu.pool.available_memory", lambda: 64 << 20)
    options = worker_options(prepare(str(make_tiny(tmp_path, "llama"))), num_pages=None, max_num_seqs=10_000)
    groups = groups_of(options)
    half = msgspec.structs.replace(options, tensor_parallel_size=2)
    quarter = msgspec.structs.replace(options, tensor_parallel_size=2, data_parallel_size=2)
    assert [pool_pages(each, groups)[0] for each in (options, half, quarter)] == [2048, 1024, 512]


def groups_of(options: WorkerOptions) -> CacheGroups:
    return CacheGroups.of(options.manifest.config, options.page_size, 1024, wanted_length(options))


@pytest.mark.parametrize("asked", [{"num_pages": 10**12}, {"num_pages": None, "kv_bytes": 10**15}], ids=str)
def test_more_kv_memory_than_there_is_is_refused(asked: dict[str, int | None], tmp_path: Path) -> None:
    options = worker_options(prepare(str(make_tiny(tmp_path, "llama"))), **asked)
    with pytest.raises(DeviceError, match=r"--[a-z-]+ 10+ takes \d+ bytes, and \d+ are available"):
        pool_pages(options, groups_of(options))


@pytest.mark.parametrize(
    ("total", "ranks", "sizes"), [(1000, 3, [328, 336, 336]), (64, 2, [32, 32]), (20, 3, [6, 7, 7])]
)
def test_features_are_shared_in_pieces_that_kernels_can_read(total: int, ranks: int, sizes: list[int]) -> None:
    """Multiples of 8, if the whole is one, next to each other and complete."""
    shares = [Group(rank, ranks).share_features(total) for rank in range(ranks)]
    assert [share.size for share in shares] == sizes
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert {share.total for share in shares} == {total}
