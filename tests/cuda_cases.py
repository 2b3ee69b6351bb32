"""A small model on the emulated GPU: its device, plans for it, and a scheduler before it."""

from collections import deque
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from proto.cache import CacheGroups
from proto.config import WorkerOptions
from proto.messages import Finish, Sampling, StepPlan, StepResult, TokenLogprobs, column
from proto.model import ModelConfig, RopeConfig
from tests.builders import GREEDY, behind_window, i32, make_plan, make_row, make_worker_options
from tests.flashinfer_double import Gpu
from tests.pair import Pair, Story
from worker.cpu.start import start as start_cpu
from worker.cuda.device import CudaDevice
from worker.cuda.flashinfer import FlashInferAttention
from worker.cuda.start import start
from worker.device import Deferred

MODEL = ModelConfig(
    family="llama",
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position_embeddings=64,
    windows=(0, 10),
    rope=RopeConfig(theta=10000.0),
)
ROWS = 6
PAGES = 64
DRAWN = Sampling(seed=11)
FILTERED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=12, logprobs=3)


def options_of(device: str, **changes: Any) -> WorkerOptions:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "page_size": 4,
        "num_pages": PAGES,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 24,
        "pipeline_depth": 3,
    }
    return make_worker_options(MODEL, device=device, **(settings | changes))


def silent(text: str, done: int, total: int) -> None:
    """No progress is shown."""


def attention_of(device: CudaDevice) -> FlashInferAttention:
    attention = device._step.attention
    assert isinstance(attention, FlashInferAttention)
    return attention


def make_device(**changes: Any) -> CudaDevice:
    """On the GPU that is simulated now."""
    device = start(options_of("cuda", **changes), silent)
    device.reset(1)
    return device


def launch(gpu: Gpu, device: CudaDevice, plan: StepPlan) -> Deferred:
    """Queue a step; the device then gets on a little, or not at all."""
    with gpu.timeline.launch_path():
        deferred = device.launch(plan)
    assert isinstance(deferred, Deferred)
    gpu.timeline.advance(gpu.timeline.random.randrange(60))
    return deferred


def ids_of(result: StepResult) -> list[int]:
    return [int(i) for i in column(result.ids)]


def both_groups(plan: StepPlan) -> StepPlan:
    """With pages of MODEL's windowed layer too."""
    return behind_window(plan, MODEL.window, alone=False)


def plans(rows: int, steps: int) -> list[StepPlan]:
    """So many requests in one prefill step, then decode steps of all."""
    admits = tuple(
        make_row(slot, [7 * slot + 1, slot + 2, 5], [5 * slot + i for i in range(5)]) for slot in range(rows)
    )
    chunks = i32(*(value for slot in range(rows) for value in (slot, 3, 1)))
    first = both_groups(make_plan(admits=admits, chunks=chunks))
    second = make_plan(step=2, decode_slots=i32(*range(rows)))
    return [first, second, *(make_plan(step=step) for step in range(3, steps + 1))]


def play(gpu: Gpu, device: CudaDevice, script: list[StepPlan], depth: int = 3) -> list[list[int]]:
    """Ids of each step, with so many in flight."""
    flight: deque[Deferred] = deque()
    results = []
    for plan in script:
        if len(flight) == depth:
            results.append(flight.popleft().wait())
        flight.append(launch(gpu, device, plan))
    results += [deferred.wait() for deferred in flight]
    return [ids_of(result) for result in results]


def changed_slots(old: torch.Tensor, new: torch.Tensor) -> set[int]:
    """Of K or V of all layers of a group."""
    return set((old != new).flatten(1, 2).any(-1).any(-1).any(0).nonzero().flatten().tolist())


def assert_close(ours: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert ours.top_ids == wanted.top_ids
    assert ours.chosen == pytest.approx(wanted.chosen, abs=1e-4)
    assert ours.top_logprobs[0] == pytest.approx(wanted.top_logprobs[0], abs=1e-4)


class Flight(deque[Any]):
    """Results on their way: the oldest is waited for when it is asked for."""

    def popleft(self) -> StepResult:
        result: StepResult = super().popleft().wait()
        return result


class LatePair(Pair):
    """`Pair` with a device whose results come late."""

    def __init__(self, gpu: Gpu, device: CudaDevice, options: WorkerOptions, **settings: Any) -> None:
        super().__init__(device, options, **settings)  # type: ignore[arg-type]
        self._gpu, self._device = gpu, device
        self._flight: Any = Flight()

    def _run(self, plan: StepPlan) -> None:
        self.steps += 1
        for slot in column(plan.released).tolist():
            del self._slots[slot]
        for row in plan.admits:
            self._slots[row.slot] = self._find(column(row.ids).tolist(), row.sampling)
        self._flight.append(launch(self._gpu, self._device, plan))
        self.deepest = max(self.deepest, len(self._flight))


def submit(pair: Pair) -> None:
    """Prompts within and beyond a page and a step; greedy, drawn, filtered; stop ids before a least length."""
    generator = np.random.default_rng(3)
    lengths = [5, 1, 30, 8, 13, 4, 9, 17]
    prompts = [generator.integers(0, MODEL.vocab_size, n).tolist() for n in lengths]
    some = list(range(0, MODEL.vocab_size, 3))
    for prompt, sampling in zip(prompts, [GREEDY, DRAWN, FILTERED, GREEDY] * 2, strict=True):
        pair.submit(prompt, 4 + len(prompt) % 9, sampling=sampling)
    pair.submit(prompts[2], 9, sampling=GREEDY)  # a prefix of somebody's, if the cache is on
    pair.submit(prompts[0], 8, sampling=FILTERED, min_new_tokens=4, stop_ids=some, num_eos=1)
    pair.submit(prompts[4], 8, min_new_tokens=3, stop_ids=some)


def told(pair: Pair) -> list[tuple[list[int], Finish]]:
    return [(story.tokens, story.finish) for story in pair.stories.values()]


@cache
def expected(prefix_caching: bool = False, preempt: int = 0) -> tuple[list[tuple[list[int], Finish]], list[Story]]:
    """By the CPU's runner."""
    options = options_of("reference")
    runner = start_cpu(options, silent)
    pair = Pair(runner, options, depth=1, prefix_caching=prefix_caching, debug_preempt_every=preempt)
    submit(pair)
    pair.run()
    return told(pair), list(pair.stories.values())


# --------------------------------------------------------------------------- any family

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 24,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "max_model_len": 96,
}


def script(config: ModelConfig) -> list[StepPlan]:
    """Two rows in a bucket of three, over the border of a page; a chunk beside decode rows."""
    groups = CacheGroups.of(config, 16, config.kv_bytes_per_token(4), SIZES["max_model_len"])
    return [behind_window(p, groups.window, not groups.full_layers) if groups.window else p for p in _script()]


def _script() -> list[StepPlan]:
    first, second = list(range(1, 14)), list(range(2, 17))
    late = make_row(2, list(range(40, 60)), [12, 13, 14])
    admits = (make_row(0, first, [0, 1, 2]), make_row(1, second, [4, 5, 6]))
    return [
        make_plan(admits=admits, chunks=i32(0, 13, 1, 1, 15, 1)),
        make_plan(step=2, decode_slots=i32(0, 1)),
        make_plan(step=3),
        make_plan(step=4, admits=(late,), chunks=i32(2, 20, 1)),
        make_plan(step=5, decode_slots=i32(2, 0, 1)),
        make_plan(step=6),
    ]
