"""`quintet estimate`: what a model's weights and KV cache need, and how many sequences fit."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from fractions import Fraction

from engine.arguments import size, whole
from engine.cli.errors import CommandError
from engine.config import MEMORY_SHARE, PAGE_SIZE, ServeConfig
from engine.flags import add_flags
from engine.models import ModelError, ProgressLines, read_config
from proto.cache import CacheGroups
from proto.model import ModelConfig

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_BYTES = _WEIGHT_BYTES | {"fp8_e4m3": 1}
_SAME_AS_SERVE = ("model", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "max_model_len")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Sizes in bytes. Those that depend on the memory are None when no memory was given."""

    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    page_size: int  # tokens
    page_bytes: int
    sequence_length: int  # tokens of prompt and output
    pages_per_sequence: int  # for layers without a window; 0 = there are none
    window_pages_per_sequence: int  # for layers with a window, which keep its pages only; 0 = there are none
    sequence_bytes: int
    memory_bytes: int | None = None
    kv_pool_bytes: int | None = None
    pages: int | None = None
    window_pages: int | None = None
    pool_tokens: int | None = None
    sequences: int | None = None  # of that length that fit at once, sharing nothing


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "estimate",
        description="Compute what a model's weights and KV cache need, and how many sequences fit in a memory. "
        "MODEL may be a config.json, or anything that `quintet serve` takes.",
    )
    add_flags(parser, ServeConfig, only=_SAME_AS_SERVE)
    group = parser.add_argument_group("what to fit")
    group.add_argument("--memory", type=size(), metavar="SIZE", help="memory of the device, such as 24GiB or 80GB")
    group.add_argument(
        "--sequence-length", type=whole(1), metavar="N", help="tokens of each sequence (default: --max-model-len)"
    )
    group.add_argument(
        "--page-size", type=whole(1), default=PAGE_SIZE, metavar="N", help="tokens of a KV page (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 shown. Raises CommandError when the model or a length cannot be used, or nothing fits."""
    try:
        config = read_config(args.model, ProgressLines(sys.stderr))
        result = estimate(
            config,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            page_size=args.page_size,
            max_model_len=args.max_model_len,
            sequence_length=_length(config, args.max_model_len, args.sequence_length),
            memory=args.memory,
            utilization=args.gpu_memory_utilization or MEMORY_SHARE,
        )
    except (ModelError, ValueError) as error:
        raise CommandError(str(error)) from None
    sys.stdout.write(json.dumps(asdict(result), indent=2) + "\n" if args.json else _table(result))
    return 0


def estimate(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    page_size: int = PAGE_SIZE,
    max_model_len: int | None = None,
    sequence_length: int,
    memory: int | None = None,
    utilization: float = MEMORY_SHARE,
) -> Estimate:
    """Compute a model's sizes, and what fits in `memory` bytes of which the share `utilization` may be used.

    Activations and the runtime's own memory are not counted. Raises ValueError when the weights alone do not fit.
    """
    weight_dtype = config.dtype if dtype == "auto" else dtype
    kv_dtype = weight_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    per_token = config.kv_bytes_per_token(_KV_BYTES[kv_dtype])
    groups = CacheGroups.of(config, page_size, per_token, max_model_len or config.max_position_embeddings)
    pages, window_pages = groups.pages(sequence_length)
    sizes = Estimate(
        parameters=config.parameters,
        weight_bytes=config.parameters * _WEIGHT_BYTES[weight_dtype],
        kv_bytes_per_token=per_token,
        page_size=page_size,
        page_bytes=per_token * page_size,
        sequence_length=sequence_length,
        pages_per_sequence=pages,
        window_pages_per_sequence=window_pages,
        sequence_bytes=groups.bytes(pages, window_pages),
    )
    return sizes if memory is None else _fit(sizes, groups, memory, utilization)


def _fit(sizes: Estimate, groups: CacheGroups, memory: int, utilization: float) -> Estimate:
    usable = int(memory * Fraction(str(utilization)))  # 0.9 means nine tenths, not the float beside it
    pool = usable - sizes.weight_bytes
    if pool < sizes.page_bytes:
        raise ValueError(
            f"--memory {_human(memory)} × {utilization:g} = {_human(usable)} has no room for a KV page of "
            f"{_human(sizes.page_bytes)} beside {_human(sizes.weight_bytes)} of weights"
        )
    pages, window_pages = groups.divide(pool)
    fitting = [
        there // needed
        for there, needed in ((pages, sizes.pages_per_sequence), (window_pages, sizes.window_pages_per_sequence))
        if needed
    ]
    return Estimate(
        **{
            **asdict(sizes),
            "memory_bytes": memory,
            "kv_pool_bytes": pool,
            "pages": pages,
            "window_pages": window_pages,
            "pool_tokens": (pages or window_pages) * sizes.page_size,
            "sequences": min(fitting),
        }
    )


def _length(config: ModelConfig, max_model_len: int | None, sequence_length: int | None) -> int:
    longest = max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ValueError(f"--max-model-len {longest} exceeds the model's {config.max_position_embeddings} positions")
    length = sequence_length or longest
    if length > longest:
        raise ValueError(f"--sequence-length {length} exceeds the longest sequence, {longest} tokens")
    return length


def _table(result: Estimate) -> str:
    rows = [
        ("weights", f"{_human(result.weight_bytes)} ({result.parameters:,} parameters)"),
        ("KV cache per token", f"{result.kv_bytes_per_token:,} bytes"),
        (f"page of {result.page_size} tokens", _human(result.page_bytes)),
        (
            f"sequence of {result.sequence_length:,} tokens",
            f"{_human(result.sequence_bytes)}, {_pages(result.pages_per_sequence, result.window_pages_per_sequence)}",
        ),
    ]
    if result.kv_pool_bytes is not None:
        rows += [
            ("left for the KV cache", _human(result.kv_pool_bytes)),
            ("room for", f"{_pages(result.pages or 0, result.window_pages or 0)} ({result.pool_tokens:,} tokens)"),
            ("sequences of that length", f"{result.sequences:,} at once, without shared prefixes"),
        ]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def _pages(pages: int, window_pages: int) -> str:
    """Write the pages of layers without a window, and of those with one."""
    behind = f"{window_pages:,} pages of layers with a window"
    return f"{pages:,} pages" + (f" and {behind}" if window_pages else "") if pages else behind


def _human(size: int) -> str:
    value, units = float(size), iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.2f} {unit}" if unit != "bytes" else f"{size} bytes"
