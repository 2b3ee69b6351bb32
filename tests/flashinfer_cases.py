"""What tests of the GPU attention share: tiny models of every family, random steps, and a way to run them.

Runs on the double (float32, head size 16), or with a GPU on FlashInfer itself (bfloat16, head size 64).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from proto.model import ModelConfig, RopeConfig
from tests.flashinfer_double import simulate
from worker.cpu.reference_attention import ReferenceAttention
from worker.cpu.reference_ops import ReferenceOps
from worker.cuda.attention import KvFormat, Limits
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.ops import CudaOps
from worker.layers.attention import AttentionShape
from worker.models import FAMILIES
from worker.models.base import Model
from worker.steps.batch import I32Array, StepBatch

PAGE = 16
NUM_PAGES = 48
MAX_LENGTH = 112
BUCKETS = (1, 2, 4, 8)
SEQUENCES = 8
VOCAB = 61


@dataclass(frozen=True, slots=True)
class Place:
    """Where the backend under test runs."""

    name: str
    dtype: torch.dtype
    head_dim: int
    tolerance: float  # of logits

    @contextmanager
    def __call__(self, seed: int) -> Iterator[None]:
        with simulate(seed) if self.name == "double" else nullcontext(), torch.inference_mode():
            yield


DOUBLE = Place("double", torch.float32, 16, 1e-4)
NARROW = Place("double", torch.bfloat16, 16, 0.25)  # as on a GPU: are all dtypes those that kernels want?
GPU = Place("gpu", torch.bfloat16, 64, 0.25)


def config(family: str, place: Place = DOUBLE, **changes: Any) -> ModelConfig:
    """A tiny model: two layers, and whatever its family is known for."""
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": place.head_dim,
        "norm_eps": 1e-5,
        "max_position_embeddings": MAX_LENGTH,
        "rope": RopeConfig(theta=1000.0),
    }
    values |= _OF_FAMILY[family]
    if "num_experts" in values and place.dtype != torch.float32:
        # Of nearly equal experts 16 bits choose now this one, now that, and logits follow.
        values["experts_per_token"] = values["num_experts"]
    return ModelConfig(**(values | changes))


_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"num_heads": 8, "tie_word_embeddings": True},  # tensor cores: a group of 4
    "mistral": {"windows": (16, 16)},
    "qwen2": {"num_heads": 7, "num_kv_heads": 1, "qkv_bias": True, "windows": (0, 33)},  # tensor cores: a group of 7
    "qwen3": {"qk_norm": True},
    "mixtral": {"num_experts": 4, "experts_per_token": 2, "expert_size": 24, "renormalise_experts": True},
    "qwen3_moe": {"num_experts": 4, "experts_per_token": 2, "expert_size": 24, "qk_norm": True, "dense_layers": (0,)},
    "gemma2": {
        "windows": (20, 0),
        "attention_soft_cap": 4.0,
        "logit_soft_cap": 9.0,
        "attention_scale": 0.3,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "windows": (17, 0),
        "qk_norm": True,
        "windowed_rope": RopeConfig(theta=100.0),
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "bloom": {"num_heads": 6, "num_kv_heads": 6, "alibi": True, "hidden_act": "gelu_pytorch_tanh"},
    "granite": {"residual_multiplier": 0.5, "logit_divisor": 2.0, "attention_scale": 0.3, "tie_word_embeddings": True},
    "olmo2": {"wide_qk_norm": True},
    "phi3": {"windows": (24, 24), "rotary_dim": 12},
}


def attention_shape(model: ModelConfig, dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        windows=model.windows,
        page_size=PAGE,
        num_pages=NUM_PAGES,
        dtype=dtype,
        scale=model.attention_scale or model.head_dim**-0.5,
        logits_soft_cap=model.attention_soft_cap,
        alibi=model.alibi,
    )


class ReferenceRunner:
    """A random model on the reference backend."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, seed: int = 0) -> None:
        self.config, self.dtype = model, dtype
        self.model: Model = FAMILIES[model.family](model, ReferenceOps(), dtype=dtype, max_position=MAX_LENGTH)
        generator = torch.Generator().manual_seed(seed)
        self.weights = []
        for path, parameter in self.model.parameters().items():
            noise = torch.randn(parameter.tensor.shape, generator=generator)
            near_one = "norm.weight" in path
            parameter.tensor.copy_(1 + 0.1 * noise if near_one else 0.25 * noise)
            self.weights.append(parameter.tensor.clone())
        self.model.pack()
        self.attention = ReferenceAttention(attention_shape(model, dtype))

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """[T, vocab] of every token."""
        self.attention.plan(batch)
        ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        return self.model.logits(self.model.hidden(ids, positions, self.attention))


@dataclass(slots=True)
class Pending:
    """Logits on their way to the host."""

    host: torch.Tensor
    event: torch.cuda.Event

    def wait(self) -> torch.Tensor:
        self.event.synchronize()
        return self.host.float()


@dataclass(slots=True)
class _Graph:
    graph: Any
    logits: torch.Tensor


class GpuRunner:
    """The same model on FlashInfer, eager and behind a CUDA graph for each bucket."""

    def __init__(self, reference: ReferenceRunner, kv_format: KvFormat | None = None, **options: Any) -> None:
        config = reference.config
        with torch.device("cuda"):
            self.model: Model = FAMILIES[config.family](
                config, CudaOps(), dtype=reference.dtype, max_position=MAX_LENGTH
            )
        for parameter, weight in zip(self.model.parameters().values(), reference.weights, strict=True):
            parameter.tensor.copy_(weight)
        self.model.pack()
        # 16 MiB hold the partial results of so few heads, and are quickly filled on the double too.
        limits = Limits(SEQUENCES, max_tokens=512, max_pages_per_row=MAX_LENGTH // PAGE, workspace_bytes=16 << 20)
        self.attention = FlashInferAttention(attention_shape(config, reference.dtype), limits, kv_format, **options)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        self.ids = torch.zeros(SEQUENCES, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(SEQUENCES, dtype=torch.int32, device="cuda")
        self.padding_id = 0  # of the rows that fill a bucket
        self.graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, batch: StepBatch) -> Pending:
        """Logits [T, vocab] of every token."""
        with torch.cuda.stream(self.stream):
            self.attention.plan(batch)
            ids = torch.from_numpy(batch.token_ids).pin_memory().to("cuda", non_blocking=True)
            positions = torch.from_numpy(batch.positions).pin_memory().to("cuda", non_blocking=True)
            return self._fetch(self.model.logits(self.model.hidden(ids, positions, self.attention)))

    def capture(self, bucket: int) -> None:
        with torch.cuda.stream(self.stream):
            self.attention.plan_graph(None, bucket, upload=True)
            self._forward(bucket)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            logits = self._forward(bucket)
        self.graphs[bucket] = _Graph(graph, logits)

    def replay(self, batch: StepBatch, bucket: int) -> Pending:
        """Logits [rows, vocab] of a batch of decode rows."""
        if bucket not in self.graphs:
            self.capture(bucket)
        rows = len(batch.token_ids)
        with torch.cuda.stream(self.stream):
            for buffer, values, fill in (
                (self.ids, batch.token_ids, self.padding_id),
                (self.positions, batch.positions, 0),
            ):
                padded = np.full(bucket, fill, np.int32)
                padded[:rows] = values
                buffer[:bucket].copy_(torch.from_numpy(padded).pin_memory(), non_blocking=True)
            self.attention.plan_graph(batch, bucket, upload=True)
            self.graphs[bucket].graph.replay()
            return self._fetch(self.graphs[bucket].logits[:rows])

    def _forward(self, bucket: int) -> torch.Tensor:
        return self.model.logits(self.model.hidden(self.ids[:bucket], self.positions[:bucket], self.attention))

    def _fetch(self, logits: torch.Tensor) -> Pending:
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Pending(host, event)


@dataclass
class Sequence:
    pages: I32Array
    ids: I32Array  # all it will ever have
    prompt: int
    done: int = 0  # computed


@dataclass
class Traffic:
    """Random steps of a few sequences that come and go, in pages scattered over the pool.

    Lengths favour page boundaries. A new sequence may begin behind a prefix of another's whole pages.
    """

    random: np.random.Generator
    live: list[Sequence] = field(default_factory=list)
    free: list[int] = field(default_factory=lambda: list(range(NUM_PAGES)))
    counts: dict[int, int] = field(default_factory=dict)  # uses of each page
    seen: dict[str, int] = field(default_factory=dict)  # kinds of rows, for the test of the test

    def step(self) -> StepBatch:
        """The next batch. At least one row, decode rows first."""
        while len(self.live) < SEQUENCES and (not self.live or self.random.random() < 0.5) and self._admit():
            pass
        decode, chunks = [], []
        only_decode = self.random.random() < 0.5
        for sequence in self.live:
            if sequence.done >= sequence.prompt:
                decode += [(sequence, 1)] if self.random.random() < 0.8 else []
            elif not only_decode and self.random.random() < 0.7:
                chunks.append((sequence, self._chunk(sequence)))
        rows = decode + chunks
        if not rows:
            sequence = self.live[0]
            rows = [(sequence, 1 if sequence.done >= sequence.prompt else self._chunk(sequence))]
            decode = rows if sequence.done >= sequence.prompt else []
        batch = self._batch(rows, len(decode))
        self.live = [s for s in self.live if s.done < len(s.ids) or self._release(s)]
        return batch

    def _admit(self) -> bool:
        length = self._length(MAX_LENGTH - 8)
        total = min(length + int(self.random.integers(1, 9)), MAX_LENGTH)
        shared: I32Array = np.zeros(0, np.int32)
        ids = self.random.integers(0, VOCAB, total).astype(np.int32)
        if self.live and self.random.random() < 0.5:
            other = self.live[self.random.integers(len(self.live))]
            whole = min(min(other.done, other.prompt) // PAGE, (length - 1) // PAGE)
            shared = other.pages[:whole]
            ids[: whole * PAGE] = other.ids[: whole * PAGE]
            self._count("prefix hit", whole > 0)
        more = -(-total // PAGE) - len(shared)
        if more > len(self.free):
            return False
        self.random.shuffle(self.free)
        own = [self.free.pop() for _ in range(more)]
        pages = np.concatenate([shared, np.array(own, np.int32)])
        for page in pages.tolist():
            self.counts[page] = self.counts.get(page, 0) + 1
        self.live.append(Sequence(pages, ids, length, len(shared) * PAGE))
        return True

    def _release(self, sequence: Sequence) -> bool:
        for page in sequence.pages.tolist():
            self.counts[page] -= 1
            if not self.counts[page]:
                self.free.append(page)
        return False

    def _length(self, most: int) -> int:
        if self.random.random() < 0.5:  # at a page boundary, or beside one
            near = PAGE * int(self.random.integers(1, most // PAGE + 1)) + int(self.random.integers(-1, 2))
            return int(np.clip(near, 1, most))
        return int(self.random.integers(1, min(most, 40) + 1))

    def _chunk(self, sequence: Sequence) -> int:
        left = sequence.prompt - sequence.done
        return left if self.random.random() < 0.4 else min(left, self._length(max(left, PAGE + 1)))

    def _batch(self, rows: list[tuple[Sequence, int]], decodes: int) -> StepBatch:
        ids, positions, slots, indices, last, page_counts = [], [], [], [], [], []
        for index, (sequence, count) in enumerate(rows):
            end = sequence.done + count
            at = np.arange(sequence.done, end)
            ids.append(sequence.ids[at])
            positions.append(at)
            slots.append(sequence.pages[at // PAGE] * PAGE + at % PAGE)
            used = -(-end // PAGE)
            indices.append(sequence.pages[:used])
            page_counts.append(used)
            last.append((end - 1) % PAGE + 1)
            self._count("decode", index < decodes)
            self._count("chunk after others", index >= decodes and sequence.done > 0)
            self._count("whole prompt", index >= decodes and end == sequence.prompt and not sequence.done)
            self._count("full last page", last[-1] == PAGE)
            self._count("new page", last[-1] == 1)
            sequence.done = end
        self._count("mixed", 0 < decodes < len(rows))
        qo = np.cumsum([0] + [count for _, count in rows])
        return StepBatch(
            token_ids=np.concatenate(ids),
            positions=np.concatenate(positions).astype(np.int32),
            kv_slots=np.concatenate(slots).astype(np.int32),
            qo_indptr=qo.astype(np.int32),
            kv_indptr=np.cumsum([0, *page_counts]).astype(np.int32),
            kv_indices=np.concatenate(indices),
            last_page_len=np.array(last, np.int32),
            slots=np.arange(len(rows), dtype=np.int32),
            decode_rows=decodes,
            logit_tokens=np.arange(qo[-1], dtype=np.int32),
        )

    def _count(self, kind: str, happened: bool) -> None:
        self.seen[kind] = self.seen.get(kind, 0) + bool(happened)


def compare(reference: ReferenceRunner, gpu: GpuRunner, traffic: Traffic, steps: int, tolerance: float) -> float:
    """Play steps on both, two of them in flight on the GPU, and assert equal logits. Returns the worst difference."""
    waiting: list[tuple[torch.Tensor, Pending]] = []
    worst = 0.0

    def settle(most: int) -> None:
        nonlocal worst
        while len(waiting) > most:
            expected, pending = waiting.pop(0)
            difference = (pending.wait() - expected).abs().max().item()
            assert difference <= tolerance, f"logits differ by {difference}"
            worst = max(worst, difference)

    for _ in range(steps):
        batch = traffic.step()
        rows = len(batch.slots)
        if batch.decode_rows == rows:
            bucket = int(traffic.random.choice([b for b in BUCKETS if b >= rows]))
            pending = gpu.replay(batch, bucket)
        else:
            pending = gpu.eager(batch)
        waiting.append((reference.logits(batch), pending))
        settle(2)
    settle(0)
    return worst
