"""`quintet status`: the processes of a running instance and what they are busy with."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.cli.target import add_address_argument, calls_explained
from proto.ids import StageKind
from proto.metrics import METRICS
from quintet_client import Client
from quintet_client.v1 import control_pb2 as pb

_TIMEOUT = 5.0  # seconds: a healthy server answers in milliseconds
_STATE_STYLES = {"ready": "green", "starting": "yellow", "stopped": "red", "dead": "red"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "status",
        help="processes and load of a running instance",
        description="Show the processes of a running instance, and its queue, batch, pages and cache hits.",
    )
    add_address_argument(parser)
    parser.add_argument("--counters", action="store_true", help="show every counter, with its unit and meaning")
    parser.add_argument("--json", action="store_true", help="print one JSON object, counters and meanings included")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 shown; everything else is raised."""
    with calls_explained(args.address), Client(args.address, timeout=_TIMEOUT) as client:
        info, load, model = client.get_server_info(), client.get_load(), client.get_model_info()
    status = status_of(info, load, model)
    if args.json:
        sys.stdout.write(json.dumps(status, indent=2) + "\n")
    else:
        console = Console(highlight=False)
        show(status, console)
        if args.counters:
            console.print()
            console.print(_counter_table(status["processes"]))
    return 0


def status_of(
    info: pb.GetServerInfoResponse, load: pb.GetLoadResponse, model: pb.GetModelInfoResponse
) -> dict[str, Any]:
    """All that is shown, as plain values: what --json prints. Memory in bytes, times in seconds."""
    return {
        "address": info.address,
        "model": model.model,
        "device": model.device,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "page_size": model.page_size,
        "uptime_seconds": info.uptime_seconds,
        "draining": info.draining,
        "versions": dict(info.versions),
        "in_flight_requests": load.in_flight_requests,
        "processes": [
            {
                "kind": pb.ProcessKind.Name(process.kind).removeprefix("PROCESS_KIND_").lower(),
                "index": process.index,
                "rank": process.rank,
                "pid": process.pid,
                "title": process.title,
                "state": pb.ProcessState.Name(process.state).removeprefix("PROCESS_STATE_").lower(),
                "rss_bytes": process.rss_bytes,
                "cpu_seconds": process.cpu_seconds,
                "restarts": process.restarts,
                "counters": dict(process.counters),
                "histograms": {
                    name: {"bounds": list(one.bounds), "counts": list(one.counts), "sum": one.sum}
                    for name, one in process.histograms.items()
                },
            }
            for process in info.processes
        ],
        "metrics": {
            kind.label: {
                metric.name: {"kind": metric.kind.value, "unit": metric.unit, "help": metric.help} for metric in metrics
            }
            for kind, metrics in METRICS.items()
        },
        "replicas": [
            {
                "index": replica.index,
                "running": replica.running,
                "waiting": replica.waiting,
                "pages_total": replica.pages_total,
                "pages_free": replica.pages_free,
                "pages_cached": replica.pages_cached,
                "cache_hit_rate": replica.cache_hit_rate,
            }
            for replica in load.replicas
        ],
    }


def show(status: dict[str, Any], console: Console) -> None:
    """The same as two tables."""
    state = "draining" if status["draining"] else f"up {_duration(status['uptime_seconds'])}"
    console.print(f"{status['model']} at {status['address']}, {status['device']} {status['dtype']}, {state}\n")
    console.print(_process_table(status["processes"]))
    console.print()
    console.print(_load_table(status["replicas"]))


def _process_table(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("process", no_wrap=True)
    table.add_column("state")
    for name in ("pid", "memory", "CPU time"):
        table.add_column(name, justify="right")
    for process in processes:
        state = process["state"]
        table.add_row(
            process["title"],
            f"[{_STATE_STYLES.get(state, 'white')}]{state}",
            str(process["pid"]),
            f"{process['rss_bytes'] / 1e6:.0f} MB",
            f"{process['cpu_seconds']:.1f} s",
        )
    return table


def _load_table(replicas: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("replica")
    for name in ("running", "waiting", "pages in use", "cached", "free", "cache hits"):
        table.add_column(name, justify="right")
    for replica in replicas:
        total, free, cached = replica["pages_total"], replica["pages_free"], replica["pages_cached"]
        table.add_row(
            str(replica["index"]),
            str(replica["running"]),
            str(replica["waiting"]),
            f"{total - free - cached} of {total}",
            str(cached),
            str(free),
            f"{replica['cache_hit_rate']:.0%}",
        )
    return table


def _counter_table(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("process", "counter", "value", "unit", "meaning"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for process in processes:
        for metric in METRICS.get(StageKind[process["kind"].upper()], ()):
            name = metric.name
            if name in process["histograms"]:
                value = _mean(process["histograms"][name])
            elif name in process["counters"]:
                value = f"{process['counters'][name]:g}"
            else:
                continue  # it has not sent a heartbeat yet
            table.add_row(process["title"], name, value, metric.unit, metric.help)
    return table


def _mean(histogram: dict[str, Any]) -> str:
    count = sum(histogram["counts"])
    return f"{count} values, mean {histogram['sum'] / count:.3g}" if count else "no values"


def _duration(seconds: float) -> str:
    """As "2 h 5 min", "5 min 3 s" or "3 s"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
