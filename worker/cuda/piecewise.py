"""CUDA graphs of steps with chunks: everything between two layers' attention, for a few numbers of tokens.

Attention over chunks cannot be captured, as its grid follows from the plan. So a capture is cut at each layer's
attention, and a replay is graph, attention, graph, attention, …, graph. Models know nothing of it: in a capture they
are given an attention that cuts.
"""

import weakref
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proto.model import ModelConfig
from worker.layers.attention import AttentionBackend, Rotation
from worker.loader.load import Progress
from worker.models.base import Model
from worker.steps.batch import StepBatch

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
ALWAYS = 256  # tokens up to which any model has graphs
# Estimates, not measured: how long the host takes to launch a layer eagerly, and what a GPU multiplies and adds up.
LAYER_SECONDS = 100e-6
OPERATIONS_PER_SECOND = 500e12


def busy_tokens(config: ModelConfig) -> int:
    """Tokens with which a layer keeps the device busy for as long as the host takes to launch it.

    Beyond, graphs gain nothing, and what they keep for each token and layer is worth more as KV memory. It is about
    100 for a model of 8B parameters, and 1500 for one of 0.6B.
    """
    mlp = config.experts_per_token * config.expert_weights if config.num_experts else config.mlp_weights
    weights = config.attention_weights + mlp
    return int(LAYER_SECONDS * OPERATIONS_PER_SECOND / (2 * weights))


def token_sizes(max_tokens: int, busy: int) -> tuple[int, ...]:
    """Those of SIZES that a step may have, up to the larger of ALWAYS and `busy` tokens."""
    return tuple(size for size in SIZES if size <= min(max_tokens, max(busy, ALWAYS)))


@dataclass(frozen=True, slots=True)
class _Cut:
    """One layer's attention: what the graph before it gives, and where the graph behind it reads."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation | None
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pieces:
    graphs: list[torch.cuda.CUDAGraph]  # one more than cuts
    cuts: list[_Cut]
    hidden: torch.Tensor
    kept: list[torch.Tensor]  # what one graph leaves for another


class PiecewiseGraphs:
    """Hidden states of steps of few tokens, padded to one of `sizes`."""

    def __init__(self, model: Model, stream: torch.cuda.Stream, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        largest = self.sizes[-1] if self.sizes else 0
        self._model = model
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            self._ids = torch.zeros(largest, dtype=torch.int32, device="cuda")
            self._positions = torch.zeros(largest, dtype=torch.int32, device="cuda")
        self._pieces: dict[int, _Pieces] = {}

    def size_for(self, tokens: int) -> int:
        """The smallest size that holds so many tokens; 0 = there is none."""
        at = bisect_left(self.sizes, tokens)
        return self.sizes[at] if at < len(self.sizes) else 0

    def capture(self, progress: Progress) -> None:
        for done, size in enumerate(reversed(self.sizes)):
            progress("capturing CUDA graphs of chunks", done, len(self.sizes))
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._pieces[size] = self._capture(size)
        progress("capturing CUDA graphs of chunks", len(self.sizes), len(self.sizes))

    def hidden(
        self, size: int, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """ids and positions [size] → hidden states [size, hidden]; attention is planned for the first T of them."""
        pieces = self._pieces[size]
        self._ids[:size].copy_(ids)
        self._positions[:size].copy_(positions)
        for graph, cut in zip(pieces.graphs, pieces.cuts, strict=False):
            graph.replay()
            cut.out.copy_(attention.run(cut.layer, cut.q, cut.k, cut.v, cut.rotation))
        pieces.graphs[-1].replay()
        return pieces.hidden

    def _capture(self, size: int) -> _Pieces:
        ids, positions = self._ids[:size], self._positions[:size]
        self._model.hidden(ids, positions, _NoAttention())  # loads modules
        torch.cuda.synchronize()
        cutter = _Cutter(self._pool)
        with cutter.lives:
            cutter.begin()
            try:
                hidden = self._model.hidden(ids, positions, cutter)
            finally:
                cutter.end()
        return _Pieces(cutter.graphs, cutter.cuts, hidden, cutter.kept)


class _NoAttention:
    """Attention to nothing: zeros."""

    def plan(self, batch: StepBatch) -> None:
        """Nothing is planned."""

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        return torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)


class _Cutter(_NoAttention):
    """Ends one graph and begins the next at each layer's attention."""

    def __init__(self, pool: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.cuts: list[_Cut] = []
        self.kept: list[torch.Tensor] = []
        self.lives = _Lives()
        self._pool = pool

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        self.end()
        self.kept += self.lives.now()
        out = super().run(layer, q, k, v)
        self.cuts.append(_Cut(layer, q, k, v, rotation, out))
        self.begin()
        return out


class _Lives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows which tensors made inside are still referenced: at a cut, those that cross it.

    They must be kept: between replays of two pieces their memory could be reused.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self._made.append(weakref.ref(value))
        return result

    def now(self) -> list[torch.Tensor]:
        alive = [tensor for made in self._made if (tensor := made()) is not None]
        self._made = [weakref.ref(tensor) for tensor in alive]
        return alive
