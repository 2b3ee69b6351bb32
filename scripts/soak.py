"""Thousands of streams for minutes: no error, memory that stays flat, health probes answered throughout.

    python scripts/soak.py [--streams 2000] [--minutes 10] [-o FILE]

Streams ask again as soon as they are answered, on a simulated GPU. Resident memory of each process is read once a
second; a process of its own asks grpc.health.v1 every 100 ms. Exit code 1 when a request failed, a process grew in
the second half, or the probes' p99 is over its limit.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc
import numpy as np
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.arguments import number
from engine.bench import conditions
from engine.bench.cpu import cpu_time
from engine.bench.load import Load, watched
from engine.bench.report import Slo, distribution, summary
from engine.bench.work import Job, Shape, Work
from quintet_client import AsyncClient
from scripts.loaded_instance import make_parser, started, write

PROBE_SECONDS = 0.1
PROBE_LIMIT_MS = 50.0
SAMPLE_SECONDS = 1.0
LENGTHS = 33
DEADLINE_SECONDS = 60.0  # the scheduler keeps a few bytes of each request until then
FLAT = 0.05  # growth from the second quarter's peak to the last quarter's
FLAT_BYTES = 4 << 20  # or this much, for small processes


class Probe(NamedTuple):
    """One question for health and what became of it."""

    at: float  # monotonic
    seconds: float
    waiting: float  # of these, seconds that threads of the prober itself were ready and got no CPU, added up
    wrong: str  # "" = it was answered


def probe(address: str, results: Connection) -> None:
    """Ask for health until told to stop; sends all `Probe`s back."""
    samples: list[Probe] = []
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        due = time.monotonic()
        while not results.poll(max(due - time.monotonic(), 0)):
            due = max(due + PROBE_SECONDS, time.monotonic())
            waited, begin, wrong = cpu_time().waiting, time.monotonic(), ""
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
                if reply.status != health_pb2.HealthCheckResponse.SERVING:
                    wrong = "not serving"
            except grpc.RpcError as error:
                wrong = error.code().name
            seconds = time.monotonic() - begin
            samples.append(Probe(begin, seconds, min(cpu_time().waiting - waited, seconds), wrong))
    results.send(samples)


async def sample_memory(pids: dict[str, int], samples: dict[str, list[int]]) -> None:
    """Resident bytes of each process, once a second, until cancelled."""
    while True:
        for name, pid in pids.items():
            samples[name].append(psutil.Process(pid).memory_info().rss)
        await asyncio.sleep(SAMPLE_SECONDS)


async def load_for(
    address: str, pids: dict[str, int], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """All streams for the time asked, then until the last answers have ended. Returns summary and memory samples."""
    samples: dict[str, list[int]] = {name: [] for name in pids}
    end = time.monotonic() + args.minutes * 60

    async with AsyncClient(address, retry=False) as client:
        vocab_size = (await client.get_model_info()).vocab_size
        work = spread(args.prompt_tokens, args.output_tokens)
        load = Load(client, timeout=DEADLINE_SECONDS)
        jobs: Iterator[Job] = itertools.takewhile(lambda _: time.monotonic() < end, work.jobs(vocab_size, 0))
        sampler = asyncio.create_task(sample_memory(pids, samples))
        watch = await watched(lambda: load.closed_loop(jobs, args.streams))
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
    return {**summary(load.calls, watch.seconds, Slo()), "client_cpu_share": watch.cpu_share}, samples


def spread(prompt_tokens: int, output_tokens: int) -> Work:
    """Outputs of half to one and a half times the length: streams that began together do not end together."""
    lengths = np.linspace(output_tokens / 2, output_tokens * 3 / 2, LENGTHS).astype(int).tolist()
    return Work("spread", [Shape("chat", prompt_tokens, max(length, 1)) for length in lengths], [1.0] * LENGTHS)


def memory(samples: list[int]) -> dict[str, Any]:
    """Peaks of the four quarters of the time, in bytes, and whether the last is no higher than the second."""
    peaks = [int(part.max()) for part in np.array_split(np.asarray(samples), 4) if part.size]
    grown = peaks[-1] - peaks[min(1, len(peaks) - 1)]
    return {"quarters": peaks, "flat": grown <= max(FLAT * peaks[-1], FLAT_BYTES)}


def soak(args: argparse.Namespace) -> dict[str, Any]:
    surroundings = conditions.machine()
    flags = ["--max-num-seqs", str(args.streams), "--disable-log-requests"]
    flags += ["--max-num-batched-tokens", str(max(4096, args.streams))]
    with started(args, flags) as (address, pids):
        # Not forked: grpc does not survive that.
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        prober = multiprocessing.get_context("spawn").Process(target=probe, args=(address, theirs))
        prober.start()
        try:
            total, samples = uvloop.run(load_for(address, pids, args))
            cpu = {name: cpu_time(pid).running / total["seconds"] for name, pid in pids.items()}
            ours.send("stop")
            probes: list[Probe] = ours.recv()
        finally:
            prober.kill()
            prober.join()
    wrong = [probe.wrong for probe in probes if probe.wrong]
    asked = {name: getattr(args, name) for name in ("device", "streams", "prompt_tokens", "output_tokens", "minutes")}
    return {
        "conditions": {**surroundings, **asked, "flags": sys.argv[1:]},
        "result": total,
        "probes": {
            "count": len(probes),
            "failed": len(wrong),
            "reasons": sorted(set(wrong)),
            "ms": distribution([probe.seconds * 1e3 for probe in probes]),
            "ms_of_server": distribution([(probe.seconds - probe.waiting) * 1e3 for probe in probes]),
        },
        "memory": {name: memory(values) for name, values in samples.items()},
        "cpu_share": cpu,
        "samples": {"rss_bytes": samples, "probes": probes},
    }


def failures(result: dict[str, Any]) -> list[str]:
    """What was promised and not kept."""
    found = [f"{count} requests ended with {code}" for code, count in result["result"]["errors"].items()]
    probes = result["probes"]
    if probes["failed"]:
        found.append(f"{probes['failed']} probes failed: {', '.join(probes['reasons'])}")
    if probes["ms"]["p99"] > PROBE_LIMIT_MS:
        found.append(f"the probes' p99 is {probes['ms']['p99']:.0f} ms; {PROBE_LIMIT_MS:.0f} is the limit")
    found += [f"{name} grew in the second half" for name, its in result["memory"].items() if not its["flat"]]
    return found


def show(result: dict[str, Any]) -> None:
    given, total, probes = result["conditions"], result["result"], result["probes"]
    print(
        f"{given['streams']} streams, {given['prompt_tokens']} in/{given['output_tokens']} out on {given['device']}: "
        f"{total['completed']} of {total['requests']} requests in {total['seconds']:.0f} s, "
        f"{total['output_tokens_per_second']:.0f} tokens/s; client: {total['client_cpu_share']:.0%} of a CPU\n"
    )
    print(f"{'RSS, MB: peak of quarter':<26}{'1':>8}{'2':>8}{'3':>8}{'4':>8}   {'':<6}{'CPU':>6}")
    for name, its in result["memory"].items():
        quarters = "".join(f"{peak / 1e6:>8.1f}" for peak in its["quarters"])
        print(f"{name:<26}{quarters}   {'flat' if its['flat'] else 'grows':<6}{result['cpu_share'][name]:>6.0%}")
    print(f"\n{probes['count']} health probes, {probes['failed']} failed; ms: {in_words(probes['ms'])}")
    print(f"without the prober's own wait for a CPU: {in_words(probes['ms_of_server'])}")
    print(conditions.in_words(given))
    for failure in failures(result):
        print(f"FAILED: {failure}")


def in_words(times: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in times.items())


def main() -> int:
    parser = make_parser(__doc__, streams=2000, prompt_tokens=128, output_tokens=128)
    parser.add_argument("--minutes", type=number(), default=10.0, help="minutes of load (default: %(default)g)")
    args = parser.parse_args()
    result = soak(args)
    show(result)
    write(result, args.output)
    return 1 if failures(result) else 0


if __name__ == "__main__":
    sys.exit(main())
