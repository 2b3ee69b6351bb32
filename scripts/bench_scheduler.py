"""Microseconds a step of the scheduler: plan + result + building what is sent, with the full policy on.

    python scripts/bench_scheduler.py [--rows 64,256,1024,4096] [--steps 300] [--peer vllm]

Two traces (scheduler_trace.py): *steady* (every row has a prompt of 256 tokens and decodes) and *churn* (prompts of 64
tokens, 5 to 14 output tokens, so that about 10 % of the rows end and are replaced in every step; measured once the
pool is full of cached pages and allocations evict; up to 1 024 rows). No model runs: ids are drawn beforehand.

With --peer vllm, vLLM's V1 scheduler (see peer_vllm_scheduler.py) gets the same requests in the same order, in rounds
by turns. A step is for us `plan` + `on_message(result)` + `outgoing` at pipeline depth 2, for vLLM `schedule` +
`update_from_output`. Accepting a request is in neither: it is reported apart, for us `on_message(Admit)`, for vLLM the
making of its `Request`, which hashes the prompt, and `add_request`. Nor are messages made from or into bytes.
Figures are medians, and ours also means, over steps of at least 95 % of the rows; *CPU* is the thread's own time,
which waits for no CPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np

from engine.runtime.stage import tame_gc
from proto.config import SchedulerOptions
from proto.messages import Admit, Message, Sampling, StepPlan, StepResult, WorkerFacts, column
from scheduler.core import Scheduler
from scripts.scheduler_trace import MAX_MODEL_LEN, PAGE_SIZE, VOCAB, WARM_STEPS, Trace, num_pages

MIN_STEPS = 40
ROUNDS = 3
MOST_CHURN_ROWS = 1024
PEER_PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm" / "bin" / "python"
PEER_DRIVER = Path(__file__).resolve().parent / "peer_vllm_scheduler.py"


@dataclass
class Timing:
    """Medians of one configuration, µs."""

    step: float  # plan + result + outgoing
    mean: float  # of the same, not their median: some work is done once in several steps
    least: float  # of the steps
    cpu: float
    plan: float
    result: float
    outgoing: float
    accept: float  # of one request
    encode: float  # msgpack of the plan and the Emit


class Ours:
    """Drives `scheduler.core.Scheduler` at pipeline depth 2."""

    def __init__(self, rows: int, churn: bool) -> None:
        self.rows = rows
        # A row that has its last step in flight keeps its slot until the result: so many more of them.
        self._live = rows + rows // 9 if churn else rows
        self._churn = churn
        self._trace = Trace(rows, churn)
        options = SchedulerOptions(
            pipeline_depth=2,
            prefix_caching=True,
            chunked_prefill=True,
            max_num_batched_tokens=max(8192, rows),
            max_num_seqs=self._live,
            max_queue=2 * rows,
            debug_preempt_every=0,
        )
        facts = WorkerFacts(
            num_pages=num_pages(rows),
            page_size=PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self._live,
            max_num_batched_tokens=max(8192, rows),
            vocab_size=VOCAB,
            device="none",
            dtype="none",
            kv_bytes_per_token=1,
        )
        self.scheduler = Scheduler(options, facts, epoch=1)
        self._ids = np.random.default_rng(0).integers(1, VOCAB, 1 << 20).astype(np.int32)
        self._now = 1
        self._encoder = msgspec.msgpack.Encoder()
        self._accept_us: list[float] = []
        for _ in range(self._live):
            self._admit()
        self._planned: list[int] = []  # rows that each step in flight samples
        self._step = 0
        self._decodes = 0

    def _admit(self) -> None:
        prompt, max_new = self._trace.next()
        admit = Admit(
            rid=self._trace.asked,
            attempt=1,
            prompt_ids=np.array(prompt, np.int32).tobytes(),
            sampling=Sampling(temperature=0, seed=self._trace.asked),
            max_new_tokens=max_new,
            stop_ids=np.array([0], np.int32).tobytes(),
            num_eos=1,
            arrival=self._now,
            opening=b"x" * 100,
        )
        begin = time.perf_counter()
        self.scheduler.on_message(admit, self._now)
        self._accept_us.append((time.perf_counter() - begin) * 1e6)

    def run(self, steps: int) -> Timing:
        """Measure so many steps in which at least 95 % of the rows run."""
        samples: list[tuple[float, ...]] = []
        tried = 0
        while len(samples) < steps:
            tried += 1
            if tried > 1000 + 20 * steps:
                raise SystemExit(f"{self.rows} rows: only {len(samples)} of {tried} steps were full enough to count")
            if self._churn:
                while self._trace.asked - self.scheduler.counts.finished < self._live:
                    self._admit()
            sample, count, plans = self._run_step()
            if count >= self.rows * 0.95 and plans == 1:
                samples.append(sample)
        columns = [[value * 1e6 for value in column] for column in zip(*samples, strict=True)]
        step, cpu, plan, result, outgoing, encode = (statistics.median(column) for column in columns)
        accept = statistics.median(self._accept_us)
        return Timing(step, statistics.mean(columns[0]), min(columns[0]), cpu, plan, result, outgoing, accept, encode)

    def _run_step(self) -> tuple[tuple[float, ...], int, int]:
        """Plan what the pipeline takes and end one step: its times, sampled rows, and how many plans were made."""
        scheduler = self.scheduler
        plans: list[StepPlan] = []
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        while (plan := scheduler.plan(self._now)) is not None:
            plans.append(plan)
        cpu = time.thread_time() - begin_cpu
        plan_time = time.perf_counter() - begin
        for plan in plans:
            if plan.decode_slots is not None:
                self._decodes = len(column(plan.decode_slots))
            self._planned.append(self._decodes + int(column(plan.chunks).reshape(-1, 3)[:, 2].sum()))
        self._now += 10_000_000
        count = self._planned.pop(0)
        result = self._result(count)
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        scheduler.on_message(result, self._now)
        middle = time.perf_counter()
        out = scheduler.outgoing()
        end = time.perf_counter()
        cpu += time.thread_time() - begin_cpu
        encode_time = self._encode([*plans, *(message for _, message in out)])
        times = (plan_time + end - begin, cpu, plan_time, middle - begin, end - middle, encode_time)
        return times, count, len(plans)

    def _result(self, count: int) -> StepResult:
        self._step += 1
        start = (self._step * 4099) % (len(self._ids) - count)
        return StepResult(
            epoch=1,
            step=self._step,
            ids=self._ids[start : start + count].tobytes(),
            counts=b"",
            statuses=b"",
            logprobs=(),
            device_ns=1_000_000,
            idle_ns=0,
        )

    def _encode(self, messages: list[Message]) -> float:
        begin = time.perf_counter()
        for message in messages:
            self._encoder.encode(message)
        return time.perf_counter() - begin


class Peer:
    """vLLM's scheduler in its own interpreter: a line in, a line out."""

    def __init__(self, rows: int, churn: bool) -> None:
        command = [str(PEER_PYTHON), str(PEER_DRIVER), str(rows), "churn" if churn else "steady"]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, steps: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"{PEER_DRIVER.name} ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(rows: int, churn: bool, steps: int) -> None:
    ours = Ours(rows, churn)
    ours.run(WARM_STEPS if churn else 1)
    timing = ours.run(steps)
    print(
        f"{'churn' if churn else 'steady':7} {rows:5} rows  {timing.step:8.1f} µs a step "
        f"(mean {timing.mean:.1f}), CPU {timing.cpu:.1f}  "
        f"(plan {timing.plan:.1f}, result {timing.result:.1f}, outgoing {timing.outgoing:.1f}; apart: msgpack "
        f"{timing.encode:.1f}, accepting one request {timing.accept:.1f}; "
        f"{ours.scheduler.counters()['evictions']:.0f} evictions)",
        flush=True,
    )


def compare(rows: int, churn: bool, steps: int) -> None:
    """Both schedulers by turns; the ratios are of medians over the rounds' medians."""
    ours, peer = Ours(rows, churn), Peer(rows, churn)
    ours.run(WARM_STEPS if churn else 1)
    peer.run(WARM_STEPS if churn else 1)
    mine: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        mine.append(asdict(ours.run(max(steps // ROUNDS, MIN_STEPS))))
        theirs.append(peer.run(max(steps // ROUNDS // 4, MIN_STEPS // 2)))
    peer.close()
    mean = statistics.median(one["mean"] for one in mine)
    print(
        f"{'churn' if churn else 'steady':7} {rows:5} rows  wall {_ratio(mine, theirs, 'step')} (our mean {mean:.1f}), "
        f"CPU {_ratio(mine, theirs, 'cpu')}; accepting one request {_ratio(mine, theirs, 'accept')}"
    )
    for name, rounds in (("ours", mine), ("vLLM", theirs)):
        listed = ", ".join(f"{one['step']:.0f} ({one['least']:.0f}, CPU {one['cpu']:.0f})" for one in rounds)
        print(f"        {name}, median (least, CPU) of each round: {listed}", flush=True)


def _ratio(mine: list[dict[str, float]], theirs: list[dict[str, float]], name: str) -> str:
    a, b = (statistics.median(one[name] for one in rounds) for rounds in (mine, theirs))
    return f"{a:.1f} µs to vLLM's {b:.1f}: 1/{b / a:.1f}"


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [64, 256, 1024, 4096]
    parser.add_argument("--rows", type=_counts, default=default, help="numbers of running rows, with commas")
    parser.add_argument("--steps", type=_count, default=300, help="measured steps for each configuration")
    parser.add_argument("--peer", choices=["vllm"], help="a scheduler to run over the same trace")
    arguments = parser.parse_args()
    tame_gc()  # as in the process
    load = os.getloadavg()[0]
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {load:.1f}; page size {PAGE_SIZE}, depth 2, prefix caching on, stop ids watched, full policy",
        flush=True,
    )
    if arguments.peer and not PEER_PYTHON.exists():
        raise SystemExit(f"--peer vllm needs {PEER_PYTHON}; see {PEER_DRIVER.name}")
    for rows in arguments.rows:
        # Beyond, prompts that replace a tenth of the rows need more tokens than a step has: rows would never be full.
        for churn in (False, True) if rows <= MOST_CHURN_ROWS else (False,):
            if arguments.peer:
                compare(rows, churn, arguments.steps)
            else:
                measure(rows, churn, arguments.steps)


if __name__ == "__main__":
    main()
