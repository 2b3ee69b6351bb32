"""The FlashInfer modules that the worker's calls need, to be compiled ahead of time for sm_90a.

Run inside the folder that make_wheels.py prepares: `python modules.py [name …]` builds those named, or all, and prints
one line each. FlashInfer names a module by its dtypes, head size and features, and loads data/aot/NAME/NAME.so without
compiling. A variant that is not here raises MissingJITCacheError with FLASHINFER_DISABLE_JIT=1.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

FEATURES: dict[str, tuple[bool, bool, bool]] = {  # name: (ALiBi, window, soft cap), of a family's layers
    "plain": (False, False, False),
    "window": (False, True, False),
    "cap": (False, False, True),
    "window-cap": (False, True, True),
    "alibi": (True, False, False),
}
FULL = 64  # head size with all features: the tiny models of scripts/gpu/check
PLAIN = 128  # head size of the models that are timed, which have none


def names() -> list[str]:
    """KIND-SIZE-FEATURE for attention: decode on CUDA cores, fa2 and fa3 for prefill and for decode on tensor cores."""
    found = ["norm", "silu", "gelu"]
    for size, features in ((FULL, FEATURES), (PLAIN, ("plain",))):
        for name in features:
            kinds = ("decode", "fa2") if name == "alibi" else ("decode", "fa2", "fa3")
            found += [f"{kind}-{size}-{name}" for kind in kinds]
        found.append(f"fa2-{size}-fp8")
    return found


def specification(name: str) -> Any:
    """FlashInfer's specification of a module, from which it compiles."""
    from flashinfer.activation import gen_act_and_mul_module
    from flashinfer.jit.norm import gen_norm_module

    if name == "norm":
        return gen_norm_module()
    if name in ("silu", "gelu"):
        return gen_act_and_mul_module("silu" if name == "silu" else "gelu_tanh")
    kind, size, features = name.split("-", 2)
    if kind == "decode":
        return _decode(int(size), *FEATURES[features])
    return _prefill(kind, int(size), *FEATURES.get(features, FEATURES["plain"]), fp8=features == "fp8")


def _decode(size: int, alibi: bool, window: bool, cap: bool) -> Any:
    import torch
    from flashinfer.jit.attention.modules import gen_batch_decode_module

    bf16 = torch.bfloat16
    return gen_batch_decode_module(bf16, bf16, bf16, torch.int32, size, size, _position(alibi), window, cap)


def _prefill(backend: str, size: int, alibi: bool, window: bool, cap: bool, fp8: bool = False) -> Any:
    """FA2: only the kernels for K and V of equal strides, which the worker's are."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_prefill_module

    make = _gen_batch_prefill_primary_module if backend == "fa2" else gen_batch_prefill_module
    q, kv = torch.bfloat16, torch.float8_e4m3fn if fp8 else torch.bfloat16
    return make(backend, q, kv, q, torch.int32, size, size, _position(alibi), window, cap, False)


def _position(alibi: bool) -> int:
    from flashinfer.utils import PosEncodingMode

    return int(PosEncodingMode.ALIBI.value if alibi else PosEncodingMode.NONE.value)


def build(wanted: set[str], out: Path) -> list[str]:
    """Compile into out/NAME/NAME.so. Returns the names of those that failed."""
    failed = []
    for name in [name for name in names() if not wanted or name in wanted]:
        start = time.monotonic()
        try:
            spec = specification(name)
            target = out / spec.name / f"{spec.name}.so"
            if not target.exists():
                spec.build()
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(spec.get_library_path(), target)
        except Exception as error:  # a compiler's message, to be shown beside the others
            failed.append(name)
            print(f"{name}: failed after {time.monotonic() - start:.0f} s: {str(error)[-2000:]}", flush=True)
        else:
            print(f"{name}: {target.stat().st_size:,} bytes in {time.monotonic() - start:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if build(set(sys.argv[1:]), Path(os.environ["AOT"])) else 0)
