"""`quintet bench online` and `offline`: measure a server as its callers see it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.bench import conditions
from engine.bench.load import Call, Load, watched
from engine.bench.report import PERCENTS, Slo, by_class, records, summary
from engine.bench.work import Work, poisson_arrivals
from quintet_client import AsyncClient

# Above, tokens may wait in this process rather than in the server.
_BUSY_CLIENT = 0.8
_LATE_CLIENT_MS = 10.0
_OFFLINE_QUEUE = 2  # requests at once for each sequence that the server runs


@dataclass(frozen=True, slots=True)
class Plan:
    """How to load the server: at a `rate` a second, or with a `concurrency`; without either, as much as it can run."""

    work: Work
    requests: int
    rate: float | None
    concurrency: int | None
    stream: bool
    slo: Slo
    seed: int
    timeout: float


async def measure(address: str, plan: Plan) -> tuple[dict[str, Any], list[Call]]:
    """Send the plan's requests. Returns the result as plain values, and the calls. Raises QuintetError."""
    surroundings = conditions.machine()
    async with AsyncClient(address, retry=False) as client:
        model = await client.get_model_info()
        before = await conditions.server(client)
        vocabulary = min(model.vocab_size, model.tokenizer_vocab_size or model.vocab_size)
        jobs = itertools.islice(plan.work.jobs(vocabulary, plan.seed), plan.requests)
        load = Load(client, timeout=plan.timeout, stream=plan.stream)
        concurrency = plan.concurrency
        if plan.rate is not None:
            offsets = poisson_arrivals(plan.rate, plan.requests, plan.seed)
            watch = await watched(lambda: load.open_loop(jobs, offsets))
        else:
            concurrency = concurrency or _OFFLINE_QUEUE * model.max_num_seqs
            watch = await watched(lambda: load.closed_loop(jobs, min(concurrency, plan.requests)))
    total = summary(load.calls, watch.seconds, plan.slo)
    total["client_cpu_share"] = watch.cpu_share
    doubts = warnings(total)
    if watch.interrupted:
        doubts.append(f"interrupted after {len(load.calls)} of {plan.requests} requests")
    result = {
        "conditions": {
            **surroundings,
            "flags": list(conditions.command_line()),
            "work": plan.work.name,
            "rate": plan.rate,
            "concurrency": concurrency,
            "seed": plan.seed,
            "server": before,
        },
        "result": total,
        "by_class": by_class(load.calls, watch.seconds, plan.slo),
        "warnings": doubts,
        "interrupted": watch.interrupted,
        "first_errors": load.messages,
        "requests": records(load.calls, min((call.clock.started for call in load.calls), default=0.0)),
    }
    return result, load.calls


def warnings(total: dict[str, Any]) -> list[str]:
    """List what makes the numbers doubtful."""
    found = []
    if total["client_cpu_share"] > _BUSY_CLIENT:
        found.append(
            f"this client used {total['client_cpu_share']:.0%} of a CPU, so it may be the limit, not the server: "
            "run several clients at once and add up their figures"
        )
    late = total["sent_late_ms"].get("p99", 0.0)
    if late > _LATE_CLIENT_MS:
        found.append(f"requests were sent {late:.0f} ms late at p99: the client or its machine is overloaded")
    for code, count in total["errors"].items():
        found.append(f"{count} of {total['requests']} requests ended with {code}; latencies are those of the others")
    return found


def show(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables and sentences."""
    total = result["result"]
    server = result["conditions"]["server"]
    console.print(f"{result['conditions']['work']} on {server['model']} ({server['device']} {server['dtype']})\n")
    console.print(_latencies({"": total, **result["by_class"]}))
    console.print()
    for line in _rates(total):
        console.print(line)
    console.print(f"[dim]{conditions.in_words(result['conditions'])}")
    for warning in result["warnings"]:
        console.print(f"[yellow]{warning}")
    for code, message in result["first_errors"].items():
        console.print(f"first {code}: {message}", style="yellow", markup=False)


def _latencies(summaries: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    for name in ("mean", *(f"p{percent}" for percent in PERCENTS), "max"):
        table.add_column(name, justify="right")
    names = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "end to end"}
    for work_class, numbers in summaries.items():
        for key, name in names.items():
            if numbers[key]:
                table.add_row(f"{name} {work_class}".strip(), *(f"{value:.1f}" for value in numbers[key].values()))
    return table


def _rates(total: dict[str, Any]) -> Sequence[str]:
    lines = [
        f"{total['completed']} of {total['requests']} requests in {total['seconds']:.1f} s: "
        f"{total['requests_per_second']:.2f} a second",
        f"{total['output_tokens_per_second']:.0f} output and {total['prompt_tokens_per_second']:.0f} prompt tokens a "
        f"second ({total['cached_tokens']} of {total['prompt_tokens']} prompt tokens from the cache)",
    ]
    goodput = total["goodput"]
    limits = {"TTFT": goodput["slo_ttft_ms"], "mean ITL": goodput["slo_itl_ms"]}
    asked = " and ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items() if limit is not None)
    if asked:
        lines.append(f"goodput with {asked}: {goodput['requests_per_second']:.2f} a second, {goodput['share']:.1%}")
    lines.append(f"client: {total['client_cpu_share']:.0%} of a CPU")
    return lines
