"""Which process limits the whole ring: tokens a second, and microseconds of CPU time a token in each process.

    python scripts/bench_ring.py [--streams 256] [--prompt-tokens 512] [--output-tokens 256] [--seconds 10] [-o FILE]

All five stages run for real on a simulated GPU, and so does the client, on this machine: they share its CPUs. First, on
the idle ring, times of calls that pass more and more hops; then the load: streams that each ask again when answered.
CPU times are the kernel's, over all threads of a process; steps and the device's share come from the heartbeats.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from engine.arguments import number
from engine.bench import conditions
from engine.bench.cpu import CpuTime, cpu_time
from engine.bench.load import Load
from engine.bench.report import Slo, summary
from engine.bench.work import Job, Shape, Work
from quintet_client import AsyncClient
from quintet_client.v1 import control_pb2 as pb
from scripts.loaded_instance import make_parser, started, write

IDLE_CALLS = 300
FULL = 0.95  # of a CPU: beyond, the process is the limit
ALL_FULL = 0.9  # of all CPUs: beyond, they are
DEVICE_FULL = 0.97
RAMP_SECONDS = 60.0
ORDER = ("client", "server", "tokenizer", "scheduler", "worker", "detokenizer", "supervisor")


@dataclass
class Moment:
    """What can be read at one instant. CPU times by process."""

    time: float
    tokens: int
    cpu: dict[str, CpuTime]
    worker: dict[str, float]  # counters of its last heartbeat


async def median_us(call: Callable[[], Awaitable[object]]) -> float:
    """Of calls one after another."""
    samples = []
    for _ in range(IDLE_CALLS):
        begin = time.perf_counter()
        await call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples)


async def idle_ring(client: AsyncClient) -> dict[str, float]:
    """Times of calls on a ring that does nothing else, in µs; the device's own step is taken off."""
    grpc = await median_us(client.get_model_info)
    tokenize = await median_us(lambda: client.tokenize("a"))
    detokenize = await median_us(lambda: client.detokenize([5]))
    one_token = await median_us(lambda: client.generate([5, 6, 7], max_new_tokens=1, ignore_eos=True))
    await asyncio.sleep(1.2)  # a heartbeat with that step in it
    step = counters(await client.get_server_info(), pb.PROCESS_KIND_WORKER)["step_seconds"] * 1e6
    return {
        "grpc_us": grpc,
        "tokenize_us": tokenize,
        "detokenize_us": detokenize,
        "one_token_us": one_token,
        "device_step_us": step,
        "tokenizer_hop_us": (tokenize - grpc) / 2,
        "detokenizer_hop_us": (detokenize - grpc) / 2,
        "hop_us": (one_token - grpc - step) / 6,
    }


def counters(info: pb.GetServerInfoResponse, kind: "pb.ProcessKind") -> dict[str, float]:
    return next((dict(process.counters) for process in info.processes if process.kind == kind), {})


async def look(client: AsyncClient, pids: dict[str, int], load: Load) -> Moment:
    worker = counters(await client.get_server_info(), pb.PROCESS_KIND_WORKER)
    cpu = {name: cpu_time(pid) for name, pid in pids.items()}
    return Moment(time.monotonic(), load.tokens, {"client": cpu_time(), **cpu}, worker)


def signalling(jobs: Iterator[Job], count: int, event: asyncio.Event) -> Iterator[Job]:
    """The same jobs; sets the event when so many were taken."""
    for position, job in enumerate(jobs):
        if position == count:
            event.set()
        yield job


async def loaded_ring(
    client: AsyncClient, pids: dict[str, int], vocab_size: int, args: argparse.Namespace
) -> dict[str, Any]:
    """The steady state with so many streams."""
    work = Work("", [Shape("chat", args.prompt_tokens, args.output_tokens)], [1.0])
    load = Load(client, timeout=600.0)
    steady = asyncio.Event()
    # The first requests prefill all at once: wait until half of them were replaced.
    jobs = signalling(work.jobs(vocab_size, 0), args.streams + args.streams // 2, steady)
    run = asyncio.create_task(load.closed_loop(jobs, args.streams))
    await asyncio.wait_for(steady.wait(), RAMP_SECONDS)
    first, ended = await look(client, pids, load), len(load.calls)
    await asyncio.sleep(args.seconds)
    last = await look(client, pids, load)
    calls = load.calls[ended:]
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
    if not calls:
        raise SystemExit(f"no request ended within {args.seconds:g} s: measure for longer (--seconds)")
    seconds = last.time - first.time
    return {**shares(first, last), "latency": summary(calls, seconds, Slo())}


def shares(first: Moment, last: Moment) -> dict[str, Any]:
    """What each process took between two instants."""
    seconds, tokens = last.time - first.time, max(last.tokens - first.tokens, 1)
    grown = {name: value - first.worker[name] for name, value in last.worker.items()}
    # Heartbeats are up to two seconds old. While there is always work, the worker's account is a clock of its own.
    worked = max(grown["device_busy_seconds"] + grown["device_idle_seconds"], 1e-9)
    steps_per_second = grown["steps"] / worked
    processes = {}
    for name in sorted(last.cpu, key=lambda name: ORDER.index(name.split("-")[0])):
        spent = last.cpu[name] - first.cpu[name]
        share = spent.running / seconds
        processes[name] = {
            "cpu_share": share,
            "waiting_share": spent.waiting / seconds,
            "us_per_token": share / tokens * seconds * 1e6,
            "us_per_step": share / max(steps_per_second, 1e-9) * 1e6,
        }
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "steps_per_second": steps_per_second,
        "rows_per_step": grown["tokens"] / max(grown["steps"], 1.0),
        "device_busy_share": grown["device_busy_seconds"] / worked,
        "processes": processes,
    }


def limit(result: dict[str, Any], cpus: int) -> str:
    """What keeps the ring from giving more tokens, in a sentence."""
    processes = result["processes"]
    busiest = max(processes, key=lambda name: float(processes[name]["cpu_share"]))
    share = processes[busiest]["cpu_share"]
    total = sum(process["cpu_share"] for process in processes.values())
    alone = 1e6 / processes[busiest]["us_per_token"]
    if result["device_busy_share"] >= DEVICE_FULL:
        return f"the device: busy {result['device_busy_share']:.1%}; {busiest} takes {share:.0%} of a CPU"
    if share >= FULL:
        return f"{busiest}: {share:.0%} of a CPU"
    if total >= ALL_FULL * cpus:
        return (
            f"the machine: all {cpus} CPUs are used ({total:.2f}), most by {busiest} ({share:.0%} of one), which alone "
            f"could pass {alone:.0f} tokens a second on a CPU of its own"
        )
    return (
        f"no CPU: {total:.2f} of {cpus} used, {busiest} the most ({share:.0%}); latency, or other work on this machine"
    )


def show(result: dict[str, Any]) -> None:
    given, idle, loaded = result["conditions"], result["idle"], result["loaded"]
    print(
        f"Idle ring, median of {IDLE_CALLS} calls: gRPC alone {idle['grpc_us']:.0f} µs; one token "
        f"{idle['one_token_us']:.0f} µs, of which the device {idle['device_step_us']:.0f}: {idle['hop_us']:.0f} µs "
        f"for each of 6 hops;\n"
        f"tokenize {idle['tokenize_us']:.0f} µs ({idle['tokenizer_hop_us']:.0f} a hop), detokenize "
        f"{idle['detokenize_us']:.0f} µs ({idle['detokenizer_hop_us']:.0f} a hop)\n"
    )
    print(
        f"{given['streams']} streams, {given['prompt_tokens']} in/{given['output_tokens']} out, {given['device']}: "
        f"{loaded['tokens_per_second']:.0f} tokens/s, {loaded['steps_per_second']:.0f} steps/s of "
        f"{loaded['rows_per_step']:.0f} rows, device busy {loaded['device_busy_share']:.1%}\n"
    )
    print(f"{'process':<16}{'CPU':>8}{'no CPU':>8}{'µs/token':>10}{'µs/step':>9}{'alone, tokens/s':>17}")
    for name, process in loaded["processes"].items():
        print(
            f"{name:<16}{process['cpu_share']:>8.1%}{process['waiting_share']:>8.1%}{process['us_per_token']:>10.1f}"
            f"{process['us_per_step']:>9.0f}{1e6 / max(process['us_per_token'], 1e-9):>17.0f}"
        )
    print(f"\nThe limit is {loaded['limit']}.")
    print(conditions.in_words(given))


async def measure(address: str, pids: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    surroundings = conditions.machine()
    async with AsyncClient(address, retry=False) as client:
        server = await conditions.server(client)
        vocab_size = (await client.get_model_info()).vocab_size
        idle = await idle_ring(client)
        loaded = await loaded_ring(client, pids, vocab_size, args)
    loaded["limit"] = limit(loaded, surroundings["cpus"])
    asked = {name: getattr(args, name) for name in ("model", "device", "streams", "prompt_tokens", "output_tokens")}
    return {"conditions": {**surroundings, **asked, "server": server}, "idle": idle, "loaded": loaded}


def main() -> int:
    parser = make_parser(__doc__, streams=256, prompt_tokens=512, output_tokens=256)
    parser.add_argument(
        "--seconds", type=number(least=4), default=10.0, help="seconds to measure, at least 4 (default: %(default)g)"
    )
    args = parser.parse_args()
    with started(args, ["--max-num-seqs", str(max(args.streams, 512))]) as (address, pids):
        result = uvloop.run(measure(address, pids, args))
    show(result)
    write(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
