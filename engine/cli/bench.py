"""`quintet bench`: how fast a server answers, and how fast the engine's own loops turn."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from engine.arguments import explained, number, output_file, whole
from engine.bench.report import Slo
from engine.bench.work import PRESETS, preset_work, work_of_file
from engine.cli.errors import FAILED, USED_WRONGLY, CommandError
from engine.cli.target import add_target_arguments, open_target
from engine.config import ConfigError, ServeConfig
from engine.flags import add_flags
from engine.models import ModelError

_WIDTH = 118
_LEAST_SECONDS = 3.0
_LONGEST_TIMEOUT = 1e6


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Measure a server as its callers see it (online, offline), or the engine's own loops (host).",
    )
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    _add_online(kinds)
    _add_offline(kinds)
    _add_host(kinds)


def _add_online(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    online = kinds.add_parser(
        "online",
        help="latency under load: requests at a given rate, or from a number of clients",
        description="Measure latency under load. Answers are streamed; token ids are random, and no answer ends early.",
    )
    either = online.add_mutually_exclusive_group(required=True)
    either.add_argument("--rate", type=number(), metavar="R", help="send R requests a second, as a Poisson process")
    either.add_argument(
        "--concurrency", type=whole(1), metavar="N", help="let N clients each send a request when theirs is answered"
    )
    _add_work(online, "chat")
    online.add_argument(
        "--slo-ttft-ms", type=number(), metavar="MS", help="count an answer as good if it begins within MS"
    )
    online.add_argument(
        "--slo-itl-ms",
        type=number(),
        metavar="MS",
        help="count it as good if its mean inter-token latency is at most MS",
    )
    online.add_argument("--plot", type=_picture, metavar="FILE", help="draw the latencies as a PNG")
    _add_target(online)


def _add_offline(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    offline = kinds.add_parser(
        "offline",
        help="throughput: all requests as fast as the server takes them",
        description="Measure throughput. Answers come whole, and the server always has more requests than it can run.",
    )
    offline.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="N",
        help="keep N requests in flight (default: twice the server's --max-num-seqs)",
    )
    _add_work(offline, "batch")
    _add_target(offline)


def _add_host(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    host = kinds.add_parser(
        "host",
        help="scheduler and worker loops at GPU speed, on a simulated device",
        description="Measure how busy scheduler and worker keep a simulated device. All their code runs, except for "
        "the arithmetic. Requests come from this process, and their tokens end here.",
    )
    add_flags(host, ServeConfig, only=("model",))
    host.add_argument(
        "--device", default="sim:h200", metavar="DEVICE", help="device to simulate (default: %(default)s)"
    )
    host.add_argument(
        "--batch", type=_counts, default="1,32,256", metavar="N,…", help="batch sizes to measure (default: %(default)s)"
    )
    host.add_argument(
        "--depth",
        type=_counts,
        default="1,2,3",
        metavar="N,…",
        help="pipeline depths to measure (default: %(default)s)",
    )
    host.add_argument(
        "--seconds",
        type=number(least=_LEAST_SECONDS),
        default=4.0,
        metavar="S",
        help=f"seconds to measure each, at least {_LEAST_SECONDS:g} (default: %(default)g)",
    )
    for name, default in (("prompt", 512), ("output", 256)):
        host.add_argument(
            f"--{name}-tokens",
            type=whole(1),
            default=default,
            metavar="N",
            help=f"tokens of each {name} (default: %(default)s)",
        )
    _add_output(host)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 measured, 1 some request failed. An interrupted run is shown, then raises KeyboardInterrupt."""
    return _host(args) if args.kind == "host" else _served(args)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", dest="output", type=output_file, metavar="FILE", help="write result and conditions as JSON"
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    add_target_arguments(parser)
    parser.add_argument("--device", metavar="DEVICE", help="device of the instance that --model starts")


def _add_work(parser: argparse.ArgumentParser, preset: str) -> None:
    group = parser.add_argument_group("work")
    either = group.add_mutually_exclusive_group()
    lengths = "; ".join(_in_words(name) for name in PRESETS)
    either.add_argument(
        "--work",
        type=explained(preset_work),
        default=preset,
        metavar="NAME",
        help=f"tokens of the requests: {lengths}; or a weighted mix such as chat=3,batch=1 (default: %(default)s)",
    )
    either.add_argument(
        "--lengths",
        type=explained(lambda text: work_of_file(Path(text))),
        metavar="FILE",
        help='draw lengths from FILE, a JSON object a line: {"prompt_tokens": 512, "output_tokens": 256}',
    )
    group.add_argument(
        "--requests", type=whole(1), default=200, metavar="N", help="requests to send (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="equal seeds send equal requests (default: %(default)s)"
    )
    group.add_argument(
        "--timeout",
        type=number(most=_LONGEST_TIMEOUT),
        default=600.0,
        metavar="S",
        help="give each request S seconds (default: %(default)g)",
    )


def _in_words(name: str) -> str:
    shape = PRESETS[name]
    shared = f"{shape.prefix_tokens} shared + " if shape.prefix_tokens else ""
    return f"{name}: {shared}{shape.prompt_tokens} in, {shape.output_tokens} out"


def _served(args: argparse.Namespace) -> int:
    from engine.bench import plot
    from engine.bench.served import Plan, measure, show

    online = args.kind == "online"
    picture: Path | None = args.plot if online else None
    if picture is not None and (obstacle := plot.why_not()):
        raise CommandError(obstacle, USED_WRONGLY)
    if args.device is not None:
        if args.model is None:
            raise CommandError("--device needs --model: it is for the instance that --model starts", USED_WRONGLY)
        args.serve_flags = ["--device", args.device, *args.serve_flags]
    slo = Slo(args.slo_ttft_ms, args.slo_itl_ms) if online else Slo()
    plan = Plan(
        work=args.lengths or args.work,
        requests=args.requests,
        rate=args.rate if online else None,
        concurrency=args.concurrency,
        stream=online,
        slo=slo,
        seed=args.seed,
        timeout=args.timeout,
    )
    with open_target(args) as address:
        result, calls = uvloop.run(measure(address, plan))
    show(result, _console())
    _write(result, args.output)
    if picture is not None:
        server = result["conditions"]["server"]
        plot.plot(calls, slo, f"{plan.work.name} on {server['model']} ({server['device']})", picture)
    if result["interrupted"]:
        raise KeyboardInterrupt
    return FAILED if result["result"]["errors"] else 0


def _host(args: argparse.Namespace) -> int:
    from engine.bench.host import measure, show
    from engine.bench.pair import PairError

    try:
        result = measure(
            args.model,
            args.device,
            batches=args.batch,
            depths=args.depth,
            seconds=args.seconds,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            tell=Console(stderr=True, highlight=False).print,
        )
    except (ModelError, ConfigError, PairError) as error:
        raise CommandError(str(error)) from None
    show(result, _console())
    _write(result, args.output)
    return 0


def _console() -> Console:
    """Make a console that is wide enough for our tables, even into a pipe."""
    return Console(highlight=False, width=max(Console().width, _WIDTH))


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
        sys.stderr.write(f"wrote {path}\n")


def _picture(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    return output_file(text)


def _counts(text: str) -> list[int]:
    return [whole(1)(part) for part in text.split(",")]
