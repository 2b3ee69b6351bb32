"""Is the GPU worker right on this GPU, and how fast is it? Writes JSON and prints a table.

    scripts/gpu/check WHEELS [--out FILE]     on a machine with an H200, Python 3.12 and torch 2.11; no network
    scripts/gpu/check --double [--out FILE]   the same steps on the simulated GPU, tiny: is this script itself in order?

What a part found is printed and written as soon as it is there: a machine may be lent for minutes. --only takes the
names of parts that shall run, as after one that left CUDA unusable for those behind it.

Correctness comes first: every family's tiny model against the reference in random steps, graphs against eager, the
error of fp8 K/V, what the launch path asks of CUDA. Then speed (see speed.py), and two ranks where there are two GPUs
(see ranks.py). A part that fails is named and the others run; the exit status is 1 if one failed. On the double,
figures of speed mean nothing and are not printed.
"""

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.gpu import ranks, speed
from tests.flashinfer_cases import (
    BUCKETS,
    DOUBLE,
    GPU,
    GpuRunner,
    Place,
    ReferenceRunner,
    Traffic,
    compare,
    config,
)
from tests.flashinfer_double import simulate
from worker.cuda.attention import KvFormat
from worker.cuda.flashinfer_api import library
from worker.models import FAMILIES

EXACT = ("families against the reference", "graphs against eager", "fp8 K/V")  # mean something on the double too
BATCHES = 200  # random steps over all families
GRAPH_TOLERANCE = 0.1  # of logits in bfloat16, between an eager step and a replay
FP8_TOLERANCE = 3.0  # of logits whose deviation is about 2: far off means wrong, not imprecise


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the GPU worker and time it.")
    parser.add_argument("--double", action="store_true", help="on the simulated GPU, tiny")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts only")
    args = parser.parse_args()
    if not args.double and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --double runs the same steps on the simulated one")
    device: AbstractContextManager[Any] = simulate(seed=1) if args.double else nullcontext()

    def tell(report: dict[str, Any], name: str) -> None:
        print("\n".join(lines_of(name, report)), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")

    with device:
        place, scale = (DOUBLE, speed.GRAIN) if args.double else (GPU, speed.H200)
        print(heading(machine(place)), flush=True)
        report = run(place, scale, args.only, tell)
    print(verdict(report))
    return 1 if report["failed"] else 0


def run(
    place: Place,
    scale: speed.Scale,
    only: Sequence[str] = (),
    tell: Callable[[dict[str, Any], str], None] = lambda report, name: None,
) -> dict[str, Any]:
    """Every part, or those named, in order; a failure ends its own part only. `tell` hears of each that is over."""
    report: dict[str, Any] = {"machine": machine(place), "parts": {}, "failed": []}
    machine_rates: dict[str, float] = {}

    def rates() -> dict[str, float]:
        machine_rates["copy_bytes_per_s"] = speed.copy_bandwidth(scale.copy_bytes)
        machine_rates["gemm_per_s"] = speed.gemm_rate(scale.gemm, place.dtype)
        return machine_rates

    steps = 4 if place is DOUBLE else -(-BATCHES // len(FAMILIES))
    parts: dict[str, Callable[[], Any]] = {
        "families against the reference": lambda: families(place, steps),
        "graphs against eager": lambda: graphs(place),
        "fp8 K/V": lambda: fp8(place),
        "what the machine can do": rates,
        "decode": lambda: list(speed.decode(scale, machine_rates["copy_bytes_per_s"])),
        "decode with an admission in each step": lambda: speed.admissions(scale),
        "requests": lambda: speed.throughput(scale),
        "prefill": lambda: speed.prefill(scale, machine_rates["gemm_per_s"]),
    }
    if place is not DOUBLE:  # which has no CUPTI; its own strict mode is for tests
        parts["launch path"] = lambda: speed.launch_calls(scale)
        if torch.cuda.device_count() >= ranks.RANKS:  # tests show them on simulated GPUs
            parts["ranks"] = lambda: ranks.compare(place, scale, machine_rates["copy_bytes_per_s"])
    if unknown := set(only) - set(parts):
        raise SystemExit(f"no parts: {', '.join(sorted(unknown))}; there are: {', '.join(parts)}")
    wanted = {*only, "what the machine can do"} if only else set(parts)
    for name, part in parts.items():
        if name not in wanted:
            continue
        begin = time.monotonic()
        try:
            found = part()
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            report["failed"].append(name)
            found = {"error": f"{type(error).__name__}: {error}"}
        report["parts"][name] = {"result": found, "seconds": round(time.monotonic() - begin, 2)}
        tell(report, name)
        gc.collect()  # what a failed part has left behind, too
        torch.cuda.empty_cache()
    return report


def machine(place: Place) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "simulated": place is DOUBLE,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "flashinfer": library().flashinfer.__version__,
        "python": platform.python_version(),
        "dtype": str(place.dtype).removeprefix("torch."),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def families(place: Place, steps: int) -> dict[str, Any]:
    """The largest difference of a logit, for each family."""
    worst = {}
    with torch.inference_mode():
        for index, family in enumerate(sorted(FAMILIES)):
            reference = ReferenceRunner(config(family, place), place.dtype)
            traffic = Traffic(np.random.default_rng(index))
            worst[family] = compare(reference, GpuRunner(reference), traffic, steps, place.tolerance)
    return {"steps": steps * len(worst), "tolerance": place.tolerance, "largest_difference": worst}


def graphs(place: Place) -> dict[str, float]:
    """Decode steps run eagerly and behind the graph of each bucket that holds them, on the same pages."""
    worst = 0.0
    with torch.inference_mode():
        reference = ReferenceRunner(config("gemma2", place), place.dtype)
        gpu = GpuRunner(reference)
        traffic = Traffic(np.random.default_rng(3))
        compared = 0
        while compared < 8:
            batch = traffic.step()
            eager = gpu.eager(batch).wait()
            if batch.decode_rows < len(batch.slots):
                continue
            for bucket in [b for b in BUCKETS if b >= len(batch.slots)]:
                difference = (gpu.replay(batch, bucket).wait() - eager).abs().max().item()
                assert difference <= GRAPH_TOLERANCE, f"bucket {bucket}: logits differ by {difference}"
                worst = max(worst, difference)
            compared += 1
    return {"steps": compared, "tolerance": GRAPH_TOLERANCE, "largest_difference": worst}


def fp8(place: Place) -> dict[str, float]:
    """Logits with K and V in e4m3 against those of the reference."""
    with torch.inference_mode():
        reference = ReferenceRunner(config("llama", place), place.dtype)
        gpu = GpuRunner(reference, KvFormat(torch.float8_e4m3fn))
        worst = compare(reference, gpu, Traffic(np.random.default_rng(3)), 12, FP8_TOLERANCE)
    return {"steps": 12, "tolerance": FP8_TOLERANCE, "largest_difference": worst}


def heading(here: dict[str, Any]) -> str:
    return f"{here['gpu']}, torch {here['torch']}, FlashInfer {here['flashinfer']}, {here['dtype']}\n"


def lines_of(name: str, report: dict[str, Any]) -> list[str]:
    """A part's results for people. Speeds of the simulated GPU are left out."""
    part, lines = report["parts"][name], [f"{name} ({report['parts'][name]['seconds']} s)"]
    result = part["result"]
    if name not in EXACT and report["machine"]["simulated"] and "error" not in result:
        return [*lines, "    ran; the simulated GPU has no speed"]
    rows = result if isinstance(result, list) else [result]
    return lines + ["    " + ", ".join(f"{key} {_text(value)}" for key, value in row.items()) for row in rows]


def verdict(report: dict[str, Any]) -> str:
    return f"\nfailed: {', '.join(report['failed'])}" if report["failed"] else "\nnothing failed"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " | ".join(_text(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
