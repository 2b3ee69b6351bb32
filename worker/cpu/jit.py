"""Scalar building blocks of the numba kernels, in float32 with every rounding spelled out.

No kernel uses `fastmath`: additions happen in the order written and a fused multiply-add is fused because
we say so, so a row's bits do not depend on how the compiler vectorised the loop around it.

bfloat16 arrays reach numba as uint16; `widen` and `narrow` convert. numba invalidates its cache by the file
of the kernel alone: after editing this file, touch the files that hold kernels.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

KernelT = TypeVar("KernelT", bound=Callable[..., None])
HelperT = TypeVar("HelperT", bound=Callable[..., Any])

FLOAT = ir.FloatType()
LOG2_E = np.float32(1.44269504088896341)
LN_2_HIGH = np.float32(0.693359375)  # few bits, so that n × LN_2_HIGH is exact
LN_2_LOW = np.float32(-2.12194440e-4)
ROUND_MAGIC = np.float32(12582912.0)  # 1.5 × 2²³: adding it leaves no room for a fraction
EXP_LOWEST = np.float32(-87.0)
EXP_HIGHEST = np.float32(88.0)
EXP_2 = np.float32(0.5)
EXP_3 = np.float32(1.6666665459e-1)
EXP_4 = np.float32(4.1665795894e-2)
EXP_5 = np.float32(8.3334519073e-3)
EXP_6 = np.float32(1.3981999507e-3)
EXP_7 = np.float32(1.9875691500e-4)
TANH_SMALL = np.float32(0.625)
TANH_3 = np.float32(-3.33332819422e-1)
TANH_5 = np.float32(1.33314422036e-1)
TANH_7 = np.float32(-5.37397155531e-2)
TANH_9 = np.float32(2.06390887954e-2)
TANH_11 = np.float32(-5.70498872745e-3)
ONE = np.float32(1.0)
TWO = np.float32(2.0)
ZERO = np.float32(0.0)


def kernel(function: KernelT) -> KernelT:
    """Compile a parallel kernel without the GIL; machine code is cached beside the file or in the user cache."""
    try:
        compiled: Any = numba.njit(parallel=True, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written: compile at each start
        compiled = numba.njit(parallel=True, nogil=True)(function)
    return cast(KernelT, compiled)


def helper(function: HelperT) -> HelperT:
    """Compile a function that kernels call."""
    compiled: Any = numba.njit(function)
    return cast(HelperT, compiled)


def inlined(function: HelperT) -> HelperT:
    """Compile a function into its callers before loops are vectorised."""
    compiled: Any = numba.njit(inline="always")(function)
    return cast(HelperT, compiled)


def _fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a × b + c with one rounding."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _float_of_bits(_typing: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), codegen


def _bits_of_float(_typing: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


fma: Any = intrinsic(_fma)
float_of_bits: Any = intrinsic(_float_of_bits)
bits_of_float: Any = intrinsic(_bits_of_float)


def widen(value: Any) -> Any:
    """float32 of a float32 or of bfloat16 bits (uint16); exact."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(value: Any) -> Any:
    def bfloat16(value: Any) -> Any:
        return float_of_bits(np.int32(np.uint32(value) << np.uint32(16)))

    def float32(value: Any) -> Any:
        return value

    return {types.uint16: bfloat16, types.float32: float32}.get(value)


def narrow(value: Any, like: Any) -> Any:
    """A float32 in the element type of `like`: itself, or bfloat16 bits rounded to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(value: Any, like: Any) -> Any:
    def bfloat16(value: Any, like: Any) -> Any:
        bits = bits_of_float(value)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return rounded if value == value else np.uint16(0x7FC0)  # a NaN must not round to infinity

    def float32(value: Any, like: Any) -> Any:
        return value

    return {types.uint16: bfloat16, types.float32: float32}.get(like.dtype)


@inlined
def exp(x: Any) -> Any:
    """e^x of a float32 within 1 ulp or so, x clamped to [-87, 88]; NaN stays NaN.

    Range reduction and polynomial of Cephes' expf (Moshier).
    """
    x = min(max(x, EXP_LOWEST), EXP_HIGHEST)
    n = fma(x, LOG2_E, ROUND_MAGIC) - ROUND_MAGIC
    r = fma(n, -LN_2_LOW, fma(n, -LN_2_HIGH, x))
    p = fma(fma(fma(fma(fma(EXP_7, r, EXP_6), r, EXP_5), r, EXP_4), r, EXP_3), r, EXP_2)
    return fma(p, r * r, r + ONE) * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@inlined
def tanh(x: Any) -> Any:
    """tanh of a float32 within 2 ulp or so; NaN stays NaN. Polynomial of Cephes' tanhf (Moshier)."""
    z = x * x
    p = fma(fma(fma(fma(TANH_11, z, TANH_9), z, TANH_7), z, TANH_5), z, TANH_3)
    return fma(p * z, x, x) if abs(x) < TANH_SMALL else ONE - TWO / (exp(x + x) + ONE)
