"""How fast the cuda device is, and how near to what the machine can do. Used by check.py.

Steps are planned as the scheduler plans them, two in flight, and timed by the device's own events. Models have the
shape of real ones and random weights.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from proto.config import WorkerOptions
from proto.messages import AdmitRow, Sampling, StepPlan, StepResult
from proto.model import ModelConfig, ModelManifest, RopeConfig
from worker.cuda.device import CudaDevice
from worker.cuda.start import start
from worker.device import Deferred
from worker.layers.parameter import Parameter
from worker.ranks.group import ALONE, Group
from worker.steps.batch import I32Array

PAGE = 16
EMPTY = b""
SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=1)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is computed: on an H200, or a grain of it on the double."""

    large: ModelConfig
    small: ModelConfig
    batches: tuple[int, ...]
    context: int  # of each row that decodes
    prompt: int  # of the prefill that is timed
    chunk: int  # of the admission in each step
    steps: int
    requests: int  # of the throughput
    lengths: tuple[int, int]  # of prompts and of outputs there
    copy_bytes: int
    gemm: int


def shape(**values: Any) -> ModelConfig:
    return ModelConfig(norm_eps=1e-5, max_position_embeddings=32768, rope=RopeConfig(theta=500000.0), **values)


LLAMA_8B = shape(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
QWEN3_06B = shape(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    qk_norm=True,
    tie_word_embeddings=True,
)
TINY = shape(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
)
H200 = Scale(LLAMA_8B, QWEN3_06B, (1, 32, 256), 1024, 8192, 256, 100, 256, (100, 1024), 4 << 30, 8192)
GRAIN = Scale(TINY, TINY, (1, 3), 24, 64, 16, 4, 4, (5, 20), 1 << 16, 64)


# --------------------------------------------------------------------------- what the machine can do


def copy_bandwidth(size: int) -> float:
    """Bytes a second, read and written, of a copy of `size` bytes on the device."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def gemm_rate(size: int, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product."""
    a = torch.ones(size, size, dtype=dtype, device="cuda")
    return 2 * size**3 / _seconds(lambda: a @ a)


def _seconds(work: Callable[[], object], times: int = 10) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


# --------------------------------------------------------------------------- a device and its plans


def make_device(
    config: ModelConfig,
    *,
    rows: int,
    tokens: int,
    length: int,
    group: Group = ALONE,
    fill: Callable[[Any, int], None] | None = None,
    deterministic: bool = False,
) -> tuple[CudaDevice, float]:
    """A device with random weights, and the seconds that its graphs took to capture. `fill`: other weights."""
    manifest = ModelManifest(
        name="random", source="random", weight_format="none", weight_files=(), config=config, tokenizer_json=""
    )
    options = WorkerOptions(
        manifest=manifest,
        device="cuda",
        dtype="auto" if config.dtype != "float32" else "float32",
        load_format="dummy",
        seed=0,
        page_size=PAGE,
        num_pages=rows * (-(-length // PAGE) + 1),
        kv_bytes=None,
        gpu_memory_utilization=0.9,
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        threads=None,
        tensor_parallel_size=group.size,
        deterministic=deterministic,
    )
    captures: list[float] = []

    def progress(text: str, done: int, total: int) -> None:
        if text == "capturing CUDA graphs":
            captures.append(time.monotonic())

    # The worker draws on the CPU, which takes minutes for 8 billion numbers.
    with mock.patch("worker.loader.model.fill_dummy", fill or _fill_on_device):
        device = start(options, progress, group)
    return device, captures[-1] - captures[0] if captures else 0.0


def _fill_on_device(parameters: dict[str, Parameter], seed: int) -> None:
    for path, parameter in parameters.items():
        if path.endswith("norm.weight"):
            parameter.tensor.fill_(1)
        else:
            parameter.tensor.normal_(0, 0.02)


class Driver:
    """Plans steps and keeps `depth` of them in flight, as scheduler and output thread do together."""

    def __init__(self, device: CudaDevice, depth: int = 2) -> None:
        self._device = device
        self._depth = depth
        self._flying: deque[Deferred] = deque()
        self._step = 0
        self._free = list(range(device.facts.num_pages))
        self._pages: dict[int, list[int]] = {}  # of each slot
        self._lengths: dict[int, int] = {}
        self._rows: I32Array | None = None  # decode rows, when they change
        self._decoding: list[int] = []
        self.results: list[StepResult] = []
        device.reset(1)

    def run(
        self,
        admits: dict[int, int] | None = None,
        chunks: list[tuple[int, int, bool]] | None = None,
        released: list[int] | None = None,
    ) -> None:
        """One step: `released` slots leave, {slot: prompt length} enter, (slot, tokens, sampled) are prefilled.

        What can be decoded is.
        """
        for slot in released or []:
            self._free += self._pages.pop(slot)
            self._decoding.remove(slot)
            self._rows = np.array(self._decoding, np.int32)
        slots, pages = self._grow()
        plan = StepPlan(
            epoch=1,
            step=self._step + 1,
            previous=self._step,
            released=_i32(released or []),
            admits=tuple(self._admit(slot, length) for slot, length in (admits or {}).items()),
            append_slots=_i32(slots),
            append_pages=_i32(pages),
            append_groups=EMPTY,
            decode_slots=None if self._rows is None else self._rows.tobytes(),
            chunks=_i32([word for chunk in chunks or [] for word in chunk]),
        )
        self._step += 1
        self._rows = None
        answer = self._device.launch(plan)
        if not isinstance(answer, Deferred):
            raise RuntimeError(f"step {self._step} was not launched: {answer}")
        self._flying.append(answer)
        for slot, _, sampled in chunks or []:
            if sampled:
                self._decoding.append(slot)
                self._rows = np.array(self._decoding, np.int32)
        self.settle(self._depth - 1)

    def fill(self, rows: int, length: int, tokens: int) -> None:
        """Prompts of `length` for slots 0 to rows - 1, as many in a step as `tokens` allow beside what decodes."""
        at_once = max((tokens - rows) // length, 1)
        for first in range(0, rows, at_once):
            slots = range(first, min(first + at_once, rows))
            self.run(dict.fromkeys(slots, length), [(slot, length, True) for slot in slots])

    @property
    def tokens(self) -> int:
        """Of all rows, whose K and V a decode step reads."""
        return sum(self._lengths[slot] for slot in self._decoding)

    def settle(self, most: int = 0) -> None:
        while len(self._flying) > most:
            self.results.append(self._flying.popleft().wait())

    def _grow(self) -> tuple[list[int], list[int]]:
        """A page for each decode row that enters one."""
        slots = []
        for slot in self._decoding:
            if self._lengths[slot] % PAGE == 0:
                slots.append(slot)
                self._pages[slot].append(self._free.pop())
            self._lengths[slot] += 1
        return slots, [self._pages[slot][-1] for slot in slots]

    def _admit(self, slot: int, length: int) -> AdmitRow:
        self._lengths[slot] = length
        self._pages[slot] = [self._free.pop() for _ in range(-(-length // PAGE))]
        ids = np.arange(length, dtype=np.int32) % 61
        return AdmitRow(
            slot=slot,
            ids=ids.tobytes(),
            start=0,
            pages=_i32(self._pages[slot]),
            sampling=SAMPLING,
            min_len=0,
            stop_ids=EMPTY,
        )


def _i32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


# --------------------------------------------------------------------------- what is timed


def decode(scale: Scale, bandwidth: float, group: Group = ALONE) -> Iterator[dict[str, Any]]:
    """Steps of decode rows alone, against reading weights and K/V once, of which each rank has its part."""
    config = scale.large
    for batch in scale.batches:
        tokens = max(scale.prompt, scale.context + batch)
        # The first rows decode while the others are prefilled.
        length = scale.context + batch + scale.steps + 2 * PAGE
        device, capture_s = make_device(config, rows=batch, tokens=tokens, length=length, group=group)
        driver = Driver(device)
        driver.fill(batch, scale.context, tokens)
        driver.run()
        driver.settle()
        driver.results.clear()
        torch.cuda.set_sync_debug_mode("error")  # waiting for events, as `settle` does, is no hidden wait
        tokens_before = driver.tokens
        begin = time.perf_counter()
        for _ in range(scale.steps):
            driver.run()
        driver.settle()
        torch.cuda.set_sync_debug_mode("default")
        wall = (time.perf_counter() - begin) / scale.steps
        weights = _weight_bytes(config)
        tokens_read = (tokens_before + driver.tokens) / 2
        kv = tokens_read * device.facts.kv_bytes_per_token
        roofline = (weights + kv) / group.size / bandwidth
        busy = sum(r.device_ns for r in driver.results) / 1e9 / scale.steps
        yield {
            "batch": batch,
            "context": tokens_read / batch,
            "step_ms": wall * 1e3,
            "device_ms": busy * 1e3,
            "roofline_ms": roofline * 1e3,
            "of_roofline": roofline / wall,
            "device_idle": max(0.0, 1 - busy / wall),
            "capture_s": capture_s,
        }
        del driver, device
        gc.collect()
        torch.cuda.empty_cache()


def admissions(scale: Scale) -> dict[str, Any]:
    """Decode steps of a small model, each of which admits one prompt: how long the device waits for the host."""
    rows, steps = max(scale.batches), scale.steps
    tokens = max(scale.prompt, scale.chunk + rows + steps)
    length = scale.chunk + rows + steps + 2 * PAGE
    device, _ = make_device(scale.small, rows=rows + steps + 1, tokens=tokens, length=length)
    driver = Driver(device)
    driver.fill(rows, scale.chunk, tokens)
    driver.settle()
    driver.results.clear()
    begin = time.perf_counter()
    for step in range(steps):
        driver.run({rows + step: scale.chunk}, [(rows + step, scale.chunk, True)])
    driver.settle()
    wall = time.perf_counter() - begin
    busy = sum(r.device_ns for r in driver.results) / 1e9
    return {
        "rows": rows,
        "chunk": scale.chunk,
        "step_ms": wall / steps * 1e3,
        "device_idle": max(0.0, 1 - busy / wall),
    }


def prefill(scale: Scale, rate: float) -> dict[str, Any]:
    """One prompt in one step, against the rate of a large matrix product."""
    config, tokens, times = scale.large, scale.prompt, 4
    device, _ = make_device(config, rows=times, tokens=tokens, length=tokens + 2 * PAGE)
    driver = Driver(device, depth=1)
    for slot in range(times):
        driver.run({slot: tokens}, [(slot, tokens, False)])
    driver.settle()
    seconds = min(r.device_ns for r in driver.results) / 1e9
    inner = config.num_heads * config.head_dim
    attention = config.num_layers * 2 * inner * tokens * tokens  # q·k and weights·v, of which the mask leaves half
    body = _weights(config) - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    operations = 2 * body * tokens + attention
    return {
        "tokens": tokens,
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "of_gemm_rate": operations / seconds / rate,
    }


def throughput(scale: Scale) -> dict[str, Any]:
    """Requests of random lengths, all there at once: prompts as the token budget allows, beside what decodes."""
    config, count, (low, high) = scale.small, scale.requests, scale.lengths
    random = np.random.default_rng(0)
    prompts, outputs = (random.integers(low, high + 1, count).tolist() for _ in range(2))
    budget = max(scale.prompt, high)
    device, _ = make_device(config, rows=count, tokens=budget, length=2 * high + 2 * PAGE)
    driver = Driver(device)
    waiting = deque(range(count))
    left: dict[int, int] = {}
    begin = time.perf_counter()
    while waiting or left:
        done = [slot for slot, more in left.items() if not more]
        left = {slot: more - 1 for slot, more in left.items() if more}
        admits: dict[int, int] = {}
        room = budget - len(left)
        while waiting and prompts[waiting[0]] <= room:
            slot = waiting.popleft()
            admits[slot] = prompts[slot]
            room -= prompts[slot]
            left[slot] = outputs[slot] - 1  # the prompt's step gives the first
        driver.run(admits, [(slot, length, True) for slot, length in admits.items()], done)
    driver.settle()
    seconds = time.perf_counter() - begin
    made = sum(len(result.ids) // 4 for result in driver.results)
    if made != sum(outputs):
        raise RuntimeError(f"{made} tokens came, {sum(outputs)} were asked for")
    return {"requests": count, "tokens_in": sum(prompts), "tokens_out": made, "tokens_out_per_s": made / seconds}


def launch_calls(scale: Scale) -> dict[str, int]:
    """What the CUDA runtime was asked for while decode steps were launched, by a trace of CUPTI. Raises on a call that
    waits for the stream or the device, on an allocation, and on a copy of pageable memory.
    """
    rows = max(scale.batches)
    tokens = max(scale.prompt, scale.chunk + rows)
    length = scale.chunk + rows + scale.steps + TRACED_STEPS + 2 * PAGE
    device, _ = make_device(scale.small, rows=rows, tokens=tokens, length=length)
    driver = Driver(device)
    driver.fill(rows, scale.chunk, tokens)
    for _ in range(scale.steps):
        driver.run()
    driver.settle()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(TRACED_STEPS):
            driver.run()
        driver.settle()
    calls: dict[str, int] = {}
    for event in trace.events():
        if event.name.startswith(("cuda", "cu", "Memcpy")):
            calls[event.name] = calls.get(event.name, 0) + 1
    bad = [name for name in calls if any(word in name for word in FORBIDDEN)]
    if bad:
        raise RuntimeError(f"on the launch path: {', '.join(f'{name} × {calls[name]}' for name in bad)}")
    return calls


TRACED_STEPS = 20
FORBIDDEN = ("StreamSynchronize", "DeviceSynchronize", "Malloc", "cudaFree", "Pageable")


def _weights(config: ModelConfig) -> int:
    """How many numbers the model has, but for norms and biases."""
    hidden, inner = config.hidden_size, config.num_heads * config.head_dim
    attention = hidden * (2 * inner + 2 * config.num_kv_heads * config.head_dim)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)


def _weight_bytes(config: ModelConfig) -> int:
    """Read by a decode step: all but the embedding, of which a few rows are."""
    read = _weights(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    return read * (4 if config.dtype == "float32" else 2)
