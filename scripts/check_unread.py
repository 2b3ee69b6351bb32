"""Find what nothing reads, with vulture: in the product, where tests and scripts are no readers, and in scripts.

vulture goes by names: one that is read anywhere counts as read everywhere. What it reports must go, or be listed
below with whoever reads it. Prints one line for each thing that is unread; exits 1 if there is one.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("detokenizer_proc", "engine", "proto", "scheduler", "server", "tokenizer_proc", "worker")
GENERATED = ["*_pb2.py", "*_pb2_grpc.py", "*/quintet_client/options.py"]

# Names that are read in ways which vulture does not see.
READERS: dict[str, tuple[str, ...]] = {
    "heartbeats, which send every field of the scheduler's Counters": (
        "dropped_rows",
        "failed_rows",
        "generated_tokens",
        "ignored_admits",
        "prefix_hit_tokens",
        "prefix_query_tokens",
        "rejected",
        "stale_results",
        "stalled_steps",
        "superseded",
        "wasted_rows",
    ),
    "server/validate.py, by the names of proto/parameters.py's fields": ("temperature",),
    "quintet estimate --json, by dataclasses.asdict": ("memory_bytes",),
    "an annotation, as a string": ("Axes",),
    "the samplers, by the names of `Sampling`'s fields": ("temperature",),
    "callers, in protobuf messages": ("eos_token_id", "stop_string", "stop_token_id"),
    "Jinja, of which these classes are extensions": ("intercepted_binops", "tags"),
    "a copy in flight: the attribute keeps its source alive": ("on_device",),
    "the interpreter": ("__cause__", "__context__", "__traceback__"),
    "Triton and vLLM, whose functions and settings scripts stand in for": ("num_gpu_blocks", "warmup"),
}
# Groundwork that nothing reads yet, and the feature that will. vulture reports few of these, since most have namesakes.
AWAITED: dict[str, tuple[str, ...]] = {
    "pinned prefixes": ("PINNED", "unpin"),
    "replay after a stage's death": ("num_detokenizers", "num_tokenizers", "restarts", "resume"),
    "replicas": ("num_schedulers",),
    "several outputs of a request, and speculative decoding": ("index", "indexes"),
    "partial answers at the deadline": ("TIME_LIMIT",),
    "quantised checkpoints": ("bits", "companions", "group_size", "quantization"),
    "observability: how long a device waited for a plan": ("idle_ns",),
}
DECORATORS = ["@overload"]  # numba registers what it decorates


def scan(root: Path, folders: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Run vulture over some folders. Returns its reports by the name that is unread, and every name that is defined."""
    vulture = Vulture(ignore_decorators=DECORATORS)
    vulture.scavenge([str(root / folder) for folder in folders if (root / folder).exists()], exclude=GENERATED)
    reports: dict[str, str] = {}
    for item in vulture.get_unused_code(min_confidence=60):
        place = item.filename.resolve().relative_to(root.resolve())
        reports.setdefault(item.name, f"{place}:{item.first_lineno}: {item.message}")
    defined = (vulture.defined_attrs, vulture.defined_funcs, vulture.defined_methods, vulture.defined_vars)
    return reports, {item.name for items in defined for item in items}


def complaints(root: Path = ROOT) -> list[str]:
    """One line for each thing that is unread, and for each name on the lists that has no business there any more."""
    read = {name: reader for reader, names in READERS.items() for name in names}
    awaited = {name: feature for feature, names in AWAITED.items() for name in names}
    product, defined = scan(root, PRODUCT)
    scripts = {
        name: report
        for name, report in scan(root, (*PRODUCT, "scripts", "tests"))[0].items()
        if report.startswith("scripts/")
    }
    lines = [report for name, report in (product | scripts).items() if name not in read | awaited]
    lines += [f"{name}: no longer unread; strike it from READERS" for name in read if name not in product | scripts]
    lines += [f"{name}: not there any more; strike it from AWAITED" for name in awaited if name not in defined]
    return sorted(lines)


def main() -> int:
    lines = complaints()
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
