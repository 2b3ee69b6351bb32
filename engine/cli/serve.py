"""`quintet serve`: run an instance. Flags that vLLM has carry vLLM's names and meanings."""

import argparse
import importlib.util
import math
import re
import sys
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.doctor import lacking_for_cuda

if TYPE_CHECKING:
    from engine.config import ServeConfig

_SIMULATED = re.compile(r"sim:[a-z0-9]+(?:,.*)?")
_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
}
_DEVICES = "cpu, reference, cuda, sim:h200, sim:h100, sim:custom"
_KV_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}
_LEAST_BUFFER = 64 << 10
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_STAGES = "server, tokenizer, scheduler, worker, detokenizer"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command's flags, in groups."""
    parser = subparsers.add_parser(
        "serve",
        help="run a model behind gRPC",
        description="Run a model behind gRPC, in five kinds of process. Stop with ^C: streams finish first.",
        usage="quintet serve --model MODEL [flags]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_address_flags(parser.add_argument_group("address"))
    _add_batch_flags(parser.add_argument_group("memory and batching"))
    _add_limit_flags(parser.add_argument_group("limits"))
    _add_process_flags(parser.add_argument_group("processes"))
    _add_unbuilt_flags(parser.add_argument_group("vLLM's, accepted with the value that changes nothing"))
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    clash = _foreign_proto()
    if clash:
        sys.stderr.write(f"quintet: error: {clash}\n")
        return 2
    if args.device == "cuda" and (lacking := lacking_for_cuda()):
        sys.stderr.write(f"quintet serve: error: --device cuda: {'; '.join(lacking)} (see `quintet doctor`)\n")
        return 2
    # Not before: a foreign `proto` would end the import in a traceback.
    from engine.supervisor import serve

    return serve(config_of(args))


def config_of(args: argparse.Namespace) -> "ServeConfig":
    """The flags as a document; exits with status 2 where two of them contradict each other."""
    from engine.config import ServeConfig, parse_wrap

    wrap = {}
    for text in args.wrap:
        try:
            kind, words = parse_wrap(text)
        except ValueError as error:
            args.parser.error(f"argument --wrap: {error}")
        if kind in wrap:
            args.parser.error(f"argument --wrap: {kind.label} is given twice")
        wrap[kind] = words
    if args.max_num_batched_tokens and args.max_num_seqs and args.max_num_batched_tokens < args.max_num_seqs:
        args.parser.error(
            f"argument --max-num-batched-tokens: {args.max_num_batched_tokens} is less than --max-num-seqs "
            f"{args.max_num_seqs}: every running sequence takes one token a step"
        )
    if args.dtype == "float16" and args.device != "cuda":
        args.parser.error(f"argument --dtype: float16 needs --device cuda; --device is {args.device}")
    if args.kv_cache_dtype != "auto" and args.device != "cuda":
        args.parser.error(f"argument --kv-cache-dtype: fp8 needs --device cuda; --device is {args.device}")
    if args.tensor_parallel_size > 1 and args.device.startswith("sim:"):
        args.parser.error(
            f"argument --tensor-parallel-size: {args.tensor_parallel_size} ranks need --device cpu, reference or cuda; "
            f"--device is {args.device}"
        )
    return ServeConfig(
        model=args.model,
        served_model_names=tuple(args.served_model_name or ()),
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        seed=args.seed,
        threads=args.threads,
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_pages=args.num_pages,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        gpu_memory_utilization=args.gpu_memory_utilization,
        prefix_caching=args.enable_prefix_caching,
        chunked_prefill=args.enable_chunked_prefill,
        pipeline_depth=args.pipeline_depth,
        enforce_eager=args.enforce_eager,
        kv_cache_dtype=args.kv_cache_dtype,
        deterministic=args.deterministic,
        debug_preempt_every=args.debug_preempt_every,
        num_servers=args.num_servers,
        max_in_flight_requests=args.max_in_flight_requests,
        max_in_flight_bytes=args.max_in_flight_bytes,
        max_stream_buffer_bytes=args.max_stream_buffer_bytes,
        max_queue=args.max_queue,
        log_requests=not args.disable_log_requests,
        run_dir=args.run_dir,
        ready_file=args.ready_file,
        drain_timeout=args.drain_timeout,
        startup_timeout=args.startup_timeout,
        stall_timeout=args.stall_timeout,
        wrap=wrap,
        log_level=args.log_level,
        parent_fd=args.parent_fd,
    )


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", type=_name, required=True, help="demo, a Hugging Face directory, a .gguf file, or org/name"
    )
    group.add_argument(
        "--served-model-name", type=_name, nargs="+", metavar="NAME", help="names that requests use (--model)"
    )
    group.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help="cpu, reference (slow, exact), cuda (not yet run on a GPU), or sim:h200, sim:h100, sim:custom",
    )
    group.add_argument("--dtype", type=_dtype, default="auto", help="auto (the model's), bfloat16, float32, float16")
    group.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    group.add_argument("--seed", type=_int(0, (1 << 63) - 1), default=0, metavar="N", help="of dummy weights")
    group.add_argument("--threads", type=_int(1, 4096), metavar="N", help="of a worker (default: one a core)")
    group.add_argument(
        "--tensor-parallel-size",
        type=_int(1, 64),
        default=1,
        metavar="N",
        help="workers, each with a part of the model, of its memory and of the cores (1)",
    )


def _add_address_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="default %(default)s; 0.0.0.0 = every interface")
    group.add_argument("--port", type=_int(0, 65535), default=50051, metavar="N", help="default %(default)s; 0 = any")
    group.add_argument("--ready-file", metavar="FILE", help="write address and pids here as JSON once serving")


def _add_batch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-model-len", type=_int(1), metavar="N", help="prompt + output tokens (the model's)")
    group.add_argument(
        "--max-num-seqs", type=_int(1, 65536), metavar="N", help="sequences at once (64; cuda: 256, sim: 512)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=_int(1), metavar="N", help="tokens a step (512; cuda, sim: 4096)"
    )
    group.add_argument("--num-pages", type=_int(2), metavar="N", help="KV pages of 16 tokens")
    group.add_argument(
        "--kv-cache-memory-bytes", type=_size, metavar="N[kmg]", help="KV memory of a worker (cpu: up to 2g)"
    )
    group.add_argument(
        "--kv-cache-dtype", type=_kv_dtype, default="auto", metavar="T", help="auto (--dtype) or fp8 = fp8_e4m3 (cuda)"
    )
    group.add_argument("--gpu-memory-utilization", type=_share, metavar="X", help="share of memory (cuda, sim: 0.9)")
    group.add_argument("--enable-prefix-caching", action=BooleanOptionalAction, default=True, help="(default: on)")
    group.add_argument("--enable-chunked-prefill", action=BooleanOptionalAction, default=True, help="(default: on)")
    group.add_argument("--pipeline-depth", type=_int(1, 8), default=2, metavar="N", help="steps in flight (default 2)")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs (cuda)")
    group.add_argument(
        "--deterministic", action="store_true", help="a reply does not depend on others' (cuda; elsewhere always so)"
    )
    group.add_argument("--debug-preempt-every", type=_int(0), default=0, metavar="N", help="force one each N steps")


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-queue", type=_int(1), default=4096, metavar="N", help="waiting requests (%(default)s)")
    group.add_argument(
        "--max-in-flight-requests", type=_int(1), default=4096, metavar="N", help="of one server (%(default)s)"
    )
    group.add_argument(
        "--max-in-flight-bytes", type=_size, default=256 << 20, metavar="N[kmg]", help="of their prompts (256m)"
    )
    group.add_argument(
        "--max-stream-buffer-bytes",
        type=_buffer_size,
        default=1 << 20,
        metavar="N[kmg]",
        help="unread by a client, at least 64k (1m)",
    )


def _add_process_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-servers", type=_int(1, 64), default=1, metavar="N", help="gRPC processes on the port (1)")
    group.add_argument("--wrap", action="append", default=[], metavar="STAGE='CMD'", help=f"tool in front of {_STAGES}")
    group.add_argument("--run-dir", metavar="DIR", help="where the instance's private directory goes")
    group.add_argument("--startup-timeout", type=_seconds, default=300, metavar="S", help="without progress (300)")
    group.add_argument("--drain-timeout", type=_seconds, default=30, metavar="S", help="for streams at a stop (30)")
    group.add_argument("--stall-timeout", type=_seconds, default=10, metavar="S", help="a silent stage hangs (10)")
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    group.add_argument("--disable-log-requests", action="store_true", help="no line for each request")
    group.add_argument("--parent-fd", type=_int(0), default=-1, help=argparse.SUPPRESS)  # stop at its end of file


def _add_unbuilt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-parallel-size", type=_only("1"), metavar="1")
    group.add_argument("--data-parallel-size", type=_only("1"), metavar="1")
    group.add_argument("--quantization", type=_only("none"), metavar="none")
    group.add_argument("--swap-space", type=_only("0"), metavar="0")


def _int(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            raise ArgumentTypeError(f"{value} is outside {low}..{'' if high is None else high}")
        return value

    return parse


def _only(neutral: str) -> Callable[[str], str]:
    """Of a flag whose feature is not built yet."""

    def parse(text: str) -> str:
        if text.lower() != neutral:
            raise ArgumentTypeError(f"{text} is not built yet; supported: {neutral}")
        return text

    return parse


def _name(text: str) -> str:
    if not text:
        raise ArgumentTypeError("a name must not be empty")
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if not match or int(match[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is not a size such as 1048576, 512m or 2g")
    return int(match[1]) * _SIZES[match[2]]


def _buffer_size(text: str) -> int:
    size = _size(text)
    if size < _LEAST_BUFFER:
        raise ArgumentTypeError(f"{text} is less than 64k, which clients that do read may leave unread for a moment")
    return size


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text} is outside 0 < x ≤ 1")
    return value


def _seconds(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text} is not finite")
    return value


def _device(text: str) -> str:
    if text not in ("cpu", "reference", "cuda") and not _SIMULATED.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is not built yet; supported: {_DEVICES}")
    return text


def _dtype(text: str) -> str:
    if text not in _DTYPES:
        raise ArgumentTypeError(f"{text!r} is not built yet; supported: {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _kv_dtype(text: str) -> str:
    if text not in _KV_DTYPES:
        raise ArgumentTypeError(f"{text!r} is not built yet; supported: {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES[text]


def _foreign_proto() -> str:
    """What is wrong when `import proto` finds another distribution's package; "" when it is ours."""
    spec = importlib.util.find_spec("proto")
    ours = Path(__file__).resolve().parents[2] / "proto" / "__init__.py"
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == ours:
        return ""
    found = spec.origin if spec is not None else None
    return (
        f"`import proto` finds {found}, not {ours}: another distribution (proto-plus?) installs a package of "
        "that name; give Quintet an environment of its own"
    )
