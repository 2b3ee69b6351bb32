"""`quintet bench`: how fast a server answers, and how fast the engine's own loops turn."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from engine.arguments import number, output_file, whole
from engine.bench.report import Slo
from engine.bench.work import PRESETS, Work, preset_work, work_of_file
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
        help="measure latency and throughput",
        description="Measure a server as its callers see it (online, offline), or the engine's own loops (host).",
    )
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    online = kinds.add_parser(
        "online",
        help="latency under a load: requests arrive at a rate, or from so many clients",
        description="Latency under a load. Each answer is streamed; token ids are random, and no answer ends early.",
    )
    either = online.add_mutually_exclusive_group(required=True)
    either.add_argument("--rate", type=number(), metavar="R", help="requests a second on average, in Poisson's times")
    either.add_argument("--concurrency", type=whole(1), metavar="N", help="clients that each wait for their answer")
    _add_work(online, "chat")
    online.add_argument("--slo-ttft-ms", type=number(), metavar="MS", help="a good answer begins within MS")
    online.add_argument("--slo-itl-ms", type=number(), metavar="MS", help="and has a mean inter-token latency of MS")
    online.add_argument("--plot", type=_picture, metavar="FILE", help="write a PNG of the distributions")
    add_target(online)
    offline = kinds.add_parser(
        "offline",
        help="throughput: all requests as fast as the server takes them",
        description="Throughput: answers come whole, and twice as many requests are under way as the server can run.",
    )
    offline.add_argument("--concurrency", type=whole(1), metavar="N", help="requests under way (2 × the server's rows)")
    _add_work(offline, "batch")
    add_target(offline)
    host = kinds.add_parser(
        "host",
        help="scheduler and worker loops at GPU speed, on a simulated device",
        description="How busy the scheduler and worker loops keep a device that is simulated: all their code runs, "
        "only the arithmetic does not. Requests come from this process, and their tokens end here.",
    )
    add_flags(host, ServeConfig, only=("model",))
    host.add_argument("--device", default="sim:h200", help="simulated device (default: %(default)s)")
    host.add_argument("--batch", type=_counts, default=[1, 32, 256], metavar="N,…", help="rows (default: 1,32,256)")
    host.add_argument("--depth", type=_counts, default=[1, 2, 3], metavar="N,…", help="pipeline depths (1,2,3)")
    host.add_argument(
        "--seconds",
        type=number(least=_LEAST_SECONDS),
        default=4.0,
        metavar="S",
        help="to measure each, at least 3 (%(default)g)",
    )
    host.add_argument("--prompt-tokens", type=whole(1), default=512, metavar="N", help="of a request (%(default)s)")
    host.add_argument("--output-tokens", type=whole(1), default=256, metavar="N", help="of a request (%(default)s)")
    host.add_argument("-o", dest="output", type=output_file, metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 measured, 1 some request failed. An interrupted run is shown, then raises KeyboardInterrupt."""
    return _host(args) if args.kind == "host" else _served(args)


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", dest="output", type=output_file, metavar="FILE", help="write result and conditions as JSON"
    )
    add_target_arguments(parser)
    parser.add_argument("--device", metavar="D", help="with --model: of that instance, as sim:h200")


def _add_work(parser: argparse.ArgumentParser, preset: str) -> None:
    group = parser.add_argument_group("work")
    either = group.add_mutually_exclusive_group()
    lengths = "; ".join(_in_words(name) for name in PRESETS)
    either.add_argument(
        "--work",
        type=_work,
        default=preset,
        metavar="NAME",
        help=f"{lengths}; or a mix with weights, as chat=3,batch=1 (default: %(default)s)",
    )
    either.add_argument(
        "--lengths",
        type=_lengths,
        metavar="FILE",
        help='lengths to draw from, a JSON object a line: {"prompt_tokens": 512, "output_tokens": 256}',
    )
    group.add_argument("--requests", type=whole(1), default=200, metavar="N", help="to send (default: %(default)s)")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="equal seeds send equal requests")
    group.add_argument(
        "--timeout",
        type=number(most=_LONGEST_TIMEOUT),
        default=600.0,
        metavar="S",
        help="for each (default: %(default)g)",
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
            raise CommandError("--device needs --model, which starts the instance that it is for", USED_WRONGLY)
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
    """Wide enough for our tables, into a pipe too."""
    return Console(highlight=False, width=max(Console().width, _WIDTH))


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
        sys.stderr.write(f"wrote {path}\n")


# ------------------------------------------------------------------ values of flags


def _picture(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    return output_file(text)


def _counts(text: str) -> list[int]:
    return [whole(1)(part) for part in text.split(",")]


def _work(text: str) -> Work:
    try:
        return preset_work(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> Work:
    try:
        return work_of_file(Path(text))
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
