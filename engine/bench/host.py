"""`quintet bench host`: do the scheduler and worker loops keep a fast device busy?

Both are the real processes; the worker builds the metadata of every step, and only its arithmetic is simulated, on a
virtual clock. This process sends requests and sinks tokens: a request that ends is replaced at once.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.bench import conditions
from engine.bench.cpu import cpu_time
from engine.bench.pair import Beat, Pair, PairError
from engine.config import ServeConfig
from engine.models import prepare
from proto.model import ModelManifest

_SINK_SECONDS = 0.001  # between two looks, so that the sink takes little of two CPUs
_CHECK_SECONDS = 0.25
_SETTLE_SECONDS = 0.5  # after the last prompt's prefill
_FILL_SECONDS = 120.0


def measure(
    model: str,
    device: str,
    *,
    batches: Sequence[int],
    depths: Sequence[int],
    seconds: float,
    prompt_tokens: int,
    output_tokens: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Measure each batch at each depth, with processes of its own. Raises ModelError, ConfigError, PairError."""
    surroundings = conditions.machine()
    manifest = prepare(model, weights_needed=False)
    cases = []
    for batch, depth in itertools.product(batches, depths):
        tell(f"batch {batch}, depth {depth}")
        config = ServeConfig(
            model=model,
            device=device,
            pipeline_depth=depth,
            max_num_seqs=batch,
            max_num_batched_tokens=max(4096, batch),
        )
        load = _ClosedLoop(manifest.config.vocab_size, batch, prompt_tokens, output_tokens)
        cases.append({"batch": batch, "depth": depth, **_case(config, manifest, load, seconds)})
    return {
        "conditions": {
            **surroundings,
            "flags": list(conditions.command_line()),
            "model": model,
            "device": device,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "seconds": seconds,
        },
        "cases": cases,
    }


class _ClosedLoop:
    """Keeps a fixed number of requests in flight."""

    def __init__(self, vocab_size: int, batch: int, prompt_tokens: int, output_tokens: int) -> None:
        self.batch = batch
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens

    def begin(self, pair: Pair) -> None:
        """Send the first requests, of different lengths so that their ends are spread over time."""
        for number in range(self.batch):
            # Long enough that the first does not end before the last begins.
            share = 1.0 + (number + 1) / self.batch
            self._send(pair, int(self._output_tokens * share))

    def turn(self, pair: Pair) -> None:
        """Sink the tokens that came, and replace requests that ended."""
        for _ in range(pair.drain()):
            self._send(pair, self._output_tokens)

    def _send(self, pair: Pair, output_tokens: int) -> None:
        ids = self._random.integers(0, self._vocab_size, self._prompt_tokens, np.int32)
        pair.admit(ids.tobytes(), output_tokens)


def _case(config: ServeConfig, manifest: ModelManifest, load: _ClosedLoop, seconds: float) -> dict[str, float]:
    with Pair(config, manifest) as pair:
        load.begin(pair)
        _run(pair, load, _FILL_SECONDS, lambda: pair.rows == load.batch)
        _run(pair, load, _SETTLE_SECONDS)
        cpu, own, step, since = pair.cpu(), cpu_time(), pair.step, time.monotonic()
        _run(pair, load, seconds)
        taken = {name: now - cpu[name] for name, now in pair.cpu().items()}
        sink = cpu_time() - own
        steps = max(pair.step - step, 1)
        worker, scheduler = (_window(pair.beats[name], since) for name in ("worker", "scheduler"))
    per_step = {
        f"{name}_{what}_us": getattr(spent, what) / steps * 1e6
        for name, spent in {**taken, "sink": sink}.items()
        for what in ("running", "waiting")
    }
    return {**_device(*worker), **_scheduler(*scheduler), **_loops(worker[1], scheduler[1]), **per_step}


def _run(pair: Pair, load: _ClosedLoop, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + seconds
    next_check = 0.0
    while (now := time.monotonic()) < end and not until():
        load.turn(pair)
        if now >= next_check:
            pair.check()
            next_check = now + _CHECK_SECONDS
        time.sleep(_SINK_SECONDS)


def _window(beats: Sequence[Beat], since: float) -> tuple[Beat, Beat]:
    """Return the first and the last heartbeat of the measured time. Raises PairError."""
    inside = [beat for beat in beats if beat.came >= since]
    if len(inside) < 2:
        raise PairError("fewer than two heartbeats arrived while measuring: raise --seconds")
    return inside[0], inside[-1]


def _device(first: Beat, last: Beat) -> dict[str, float]:
    def grown(name: str) -> float:
        return last.counters[name] - first.counters[name]

    steps = max(grown("steps"), 1.0)
    busy = grown("device_busy_seconds")
    seconds = last.came - first.came
    return {
        # The first is a share of the time in which rows were running; the second of all time, in which a request may
        # have ended before the next one came.
        "busy_share": busy / max(busy + grown("device_idle_seconds"), 1e-9),
        "busy_share_of_wall": busy / seconds,
        "device_step_us": busy / steps * 1e6,
        "rows": grown("tokens") / steps,
        "steps_per_second": steps / seconds,
        "tokens_per_second": grown("tokens") / seconds,
    }


def _scheduler(first: Beat, last: Beat) -> dict[str, float]:
    def mean_us(name: str) -> float:
        before, now = first.histograms[name], last.histograms[name]
        return (now.sum - before.sum) / max(sum(now.counts) - sum(before.counts), 1) * 1e6

    return {"turnaround_us": mean_us("turnaround_seconds"), "plan_us": mean_us("plan_seconds")}


def _loops(worker: Beat, scheduler: Beat) -> dict[str, float]:
    return {
        "worker_loop_busy_share": worker.counters["loop_busy_share"],
        "scheduler_loop_busy_share": scheduler.counters["loop_busy_share"],
    }


# ------------------------------------------------------------------ for people

_COLUMNS = (
    ("batch", "batch", "{:.0f}"),
    ("depth", "depth", "{:.0f}"),
    ("busy", "busy_share", "{:.2%}"),
    ("of wall", "busy_share_of_wall", "{:.2%}"),
    ("device", "device_step_us", "{:.0f}"),
    ("plan→result", "turnaround_us", "{:.0f}"),
    ("scheduler", "scheduler_running_us", "{:.0f}"),
    ("worker", "worker_running_us", "{:.0f}"),
    ("sink", "sink_running_us", "{:.0f}"),
    ("plan", "plan_us", "{:.0f}"),
    ("no CPU", "", "{:.0f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
)


def show(result: dict[str, Any], console: Console) -> None:
    """Print one row for each case."""
    given = result["conditions"]
    console.print(
        f"{given['model']} on {given['device']}, {given['prompt_tokens']} in/{given['output_tokens']} out\n"
        "µs a step: the device's time, from plan to result, CPU time of each process, time to make a plan, and how "
        "long scheduler and worker waited for a CPU\n"
    )
    table = Table(box=None, pad_edge=False)
    for name, _, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for case in result["cases"]:
        waiting = case["scheduler_waiting_us"] + case["worker_waiting_us"]
        table.add_row(*(form.format(case[key] if key else waiting) for _, key, form in _COLUMNS))
    console.print(table)
    console.print(f"\n[dim]{conditions.in_words(given)}", soft_wrap=True)
