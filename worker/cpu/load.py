"""The forward pass on torch: devices "cpu" and "reference"."""

import os
from collections.abc import Callable

import numba
import torch

from proto.config import WorkerOptions
from proto.model import ModelManifest
from worker.cpu.attention import CpuAttention
from worker.cpu.gemm import find_rule
from worker.cpu.ops import CpuOps
from worker.cpu.pool import PoolSize, agree_on_pool, size_pool
from worker.cpu.reference_attention import ReferenceAttention
from worker.cpu.reference_ops import ReferenceOps
from worker.cpu.self_test import check_law
from worker.layers.attention import AttentionBackend, AttentionShape
from worker.layers.gemm_shape import GemmShape
from worker.layers.ops import Ops
from worker.loader.errors import LoadError
from worker.loader.load import fill_dummy, load_checkpoint
from worker.models import FAMILIES
from worker.models.base import Model
from worker.ranks.group import ALONE, Group
from worker.steps.batch import StepBatch

Progress = Callable[[str, int, int], None]

DEVICES = ("cpu", "reference")


class TorchForward:
    """See `worker.cpu.forward.Forward`. Build it with `load`."""

    def __init__(
        self,
        options: WorkerOptions,
        model: Model,
        attention: AttentionBackend,
        ops: Ops,
        pool: PoolSize,
        dtype: torch.dtype,
    ) -> None:
        config = options.manifest.config
        self.num_pages = pool.num_pages
        self.window = pool.window
        self.window_pages = pool.window_pages
        self.page_size = options.page_size
        self.max_model_len = pool.max_model_len
        self.vocab_size = config.vocab_size
        self.kv_bytes_per_token = config.kv_bytes_per_token(dtype.itemsize)
        self.device = options.device
        self.dtype = str(dtype).removeprefix("torch.")
        self._model = model
        self._attention = attention
        self._row_multiple = ops.row_multiple

    @classmethod
    def load(cls, options: WorkerOptions, progress: Progress, group: Group = ALONE) -> "TorchForward":
        """Read weights, allocate KV memory, compile what needs compiling, and check the law.

        All ranks of `group` do the same at the same time; the law is checked on all of them, on the whole logits.
        dtype "auto" is the checkpoint's own on these devices if bfloat16 or float32, and float32 for float16.
        Raises LoadError, naming the file or the option.
        """
        if options.device not in DEVICES:
            raise LoadError(f"device {options.device!r} is not one of {', '.join(DEVICES)}")
        config = options.manifest.config
        family = _family(options.manifest)
        dtype = resolve_dtype(options.dtype, config.dtype)
        cores = max(len(os.sched_getaffinity(0)) // (group.size * options.data_parallel_size), 1)
        threads = min(options.threads or cores, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        torch.set_num_threads(threads)
        local = group.shape(config)
        pool = agree_on_pool(size_pool(options, local.kv_bytes_per_token(dtype.itemsize)), group, options.page_size)
        shape = AttentionShape(
            num_layers=config.num_layers,
            num_heads=local.num_heads,
            num_kv_heads=local.num_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            page_size=options.page_size,
            num_pages=pool.num_pages,
            window_pages=pool.window_pages,
            dtype=dtype,
            scale=config.attention_scale or config.head_dim**-0.5,
            logits_soft_cap=config.attention_soft_cap,
            alibi=config.alibi,
            heads=group.share_heads(config)[0],
        )
        ops: Ops
        attention: AttentionBackend
        if options.device == "reference":
            ops, attention = ReferenceOps(), ReferenceAttention(shape)
        else:
            progress("checking matrix products", 0, 0)
            shapes = _gemm_shapes(options, family, dtype, group.size)
            ops = CpuOps(group.agree(lambda: find_rule(shapes)), threads)  # all ranks must pad alike
            attention = CpuAttention(shape, threads)
        # The length that is wanted, whatever the pages hold: LongRoPE's choice must not follow from free memory.
        longest = options.max_model_len or config.max_position_embeddings
        model = _model(options, family, ops, dtype, longest, progress, group)
        forward = cls(options, model, attention, ops, pool, dtype)
        progress("compiling kernels and checking that outputs do not depend on the batch", 0, 0)
        check_law(forward)
        return forward

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write this step's K/V into the pages and return logits [S, vocab] float32 of `batch.logit_tokens`."""
        self._attention.plan(batch)
        ids = self._padded(torch.from_numpy(batch.token_ids))
        hidden = self._model.hidden(ids, torch.from_numpy(batch.positions), self._attention)
        sampled = len(batch.logit_tokens)
        if not sampled:
            return torch.empty(0, self.vocab_size)
        rows = self._padded(torch.from_numpy(batch.logit_tokens))
        return self._model.logits(hidden[rows])[:sampled]

    def _padded(self, indices: torch.Tensor) -> torch.Tensor:
        """int32 [n] → with zeros up to a multiple of the rows that matrix products want."""
        return torch.nn.functional.pad(indices, (0, -len(indices) % self._row_multiple))


def resolve_dtype(wanted: str, checkpoint: str) -> torch.dtype:
    """The dtype to compute in. Raises LoadError for float16, which CPUs compute slowly and these kernels not at all."""
    if wanted == "auto":
        return torch.bfloat16 if checkpoint == "bfloat16" else torch.float32
    if wanted == "bfloat16":
        return torch.bfloat16
    if wanted == "float32":
        return torch.float32
    raise LoadError(f"dtype {wanted!r} is not supported on this device; use auto, bfloat16 or float32")


def _family(manifest: ModelManifest) -> type[Model]:
    if manifest.config.family not in FAMILIES:
        raise LoadError(f"{manifest.source}: family {manifest.config.family!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[manifest.config.family]


def _gemm_shapes(options: WorkerOptions, family: type[Model], dtype: torch.dtype, ranks: int) -> list[GemmShape]:
    """Return those of all ranks, each once, from models that hold no memory."""
    found: dict[GemmShape, None] = {}
    for rank in range(ranks):
        with torch.device("meta"):
            model = _build(options.manifest, family, ReferenceOps(), dtype, 1, Group(rank, ranks))
        found |= dict.fromkeys(model.gemm_shapes(options.max_num_batched_tokens, options.max_num_seqs))
    return list(found)


def _build(
    manifest: ModelManifest, family: type[Model], ops: Ops, dtype: torch.dtype, max_position: int, group: Group
) -> Model:
    try:
        return family(manifest.config, ops, dtype=dtype, max_position=max_position, group=group)
    except ValueError as error:
        raise LoadError(f"{manifest.source}: {error}") from error


def _model(
    options: WorkerOptions,
    family: type[Model],
    ops: Ops,
    dtype: torch.dtype,
    max_position: int,
    progress: Progress,
    group: Group,
) -> Model:
    model = _build(options.manifest, family, ops, dtype, max_position, group)
    if options.load_format == "dummy":
        fill_dummy(model.parameters(), options.seed)
    else:
        load_checkpoint(options.manifest, model.parameters(), progress)
    model.pack()
    return model
