"""Compile our Triton kernels for sm_90 on a machine without a GPU: does each launch, as the worker makes them, compile?

    python -m scripts.gpu.triton_ahead      needs torch and triton 3.6; prints a line a launch, exits 1 if one failed

Kernels are called as ever, on the CPU's tensors; instead of being run they are compiled for what they were given. What
Triton's interpreter (TRITON_INTERPRET=1) makes of them says whether they are right, and this, whether a GPU takes them.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

E4M3 = torch.float8_e4m3fn
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    E4M3: "*fp8e4nv",
}
ALIGNED = [["tt.divisibility", 16]]  # of addresses and numbers, which Triton makes use of


class Ahead:
    """Stands in for `JITFunction.run`: compiles for Hopper."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        import triton  # type: ignore[import-not-found, unused-ignore]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
        from triton.compiler import ASTSource  # type: ignore[import-not-found, unused-ignore]

        names = {parameter.name for parameter in kernel.params}
        given = inspect.signature(kernel.fn).bind(*args, **{n: v for n, v in options.items() if n in names}).arguments
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            signature[parameter.name] = kind = _kind(value, parameter.is_constexpr)
            if kind == "constexpr":
                constants[index,] = value
            elif kind.startswith("*") or (kind == "i32" and value % 16 == 0):
                attributes[index,] = ALIGNED
        source = ASTSource(kernel, signature, constants, attributes)
        rest = {name: value for name, value in options.items() if name not in names}
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=rest)
        self.compiled.append(f"{kernel.fn.__name__}: {len(done.asm['cubin'])} bytes, {done.metadata.shared} shared")


def _kind(value: Any, constant: bool) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if constant or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "i32" if isinstance(value, int) else "fp32"


def launches() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Functions and arguments, as the worker calls them with head sizes and numbers of experts of real models."""
    int32, bf16 = torch.int32, torch.bfloat16
    for size in (64, 128, 256):
        angles, numbers = torch.zeros(100, size // 2), torch.zeros(5, dtype=int32)
        q, k = torch.zeros(5, 8, size, dtype=bf16), torch.zeros(5, 2, size, dtype=bf16)
        for dtype in (bf16, E4M3):
            pages = torch.zeros(9, 16, 2, size).to(dtype)
            kv = (k, k, numbers, pages, pages, 1.0, 1.0)
            yield "write_kv", kv
            yield "rotate_and_write", (q, numbers, angles, angles, *kv)
    for experts, count in ((8, 2), (128, 8)):
        yield "route", (torch.zeros(5, experts), count, True)
        ends, order = torch.zeros(experts, dtype=int32), torch.zeros(5 * count, dtype=torch.int64)
        for dtype in (bf16, torch.float16):
            x, weight = torch.zeros(5, 64, dtype=dtype), torch.zeros(experts, 96, 64, dtype=dtype)
            for height in (16, 64):
                yield "grouped_product", (x, weight, ends, order, count, height)
        yield "weighted_sum", (torch.zeros(5 * count, 64, dtype=bf16), torch.zeros(5, count))


def main() -> int:
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]

    from worker.cuda import kernels as cuda_kernels

    ahead, failed = Ahead(), 0
    JITFunction.run = lambda kernel, *args, **options: ahead.run(kernel, *args, **options)
    for name, arguments in launches():
        ahead.compiled.clear()
        given = ", ".join(str(tuple(v.shape)) if isinstance(v, torch.Tensor) else str(v) for v in arguments)
        try:
            getattr(cuda_kernels, name)(*arguments)
        except Exception as error:  # a compiler's message, to be shown beside the others
            failed += 1
            print(f"{name} of {given}: failed: {str(error)[-1000:]}")
        else:
            print(f"{name} of {given}: {'; '.join(ahead.compiled)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
