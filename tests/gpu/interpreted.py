"""Triton's interpreter, rounding as every card does.

The interpreter multiplies and adds in numpy, which rounds twice where a card rounds once; it cuts
float32 to bfloat16 instead of rounding; and it takes bfloat16 matrices for integers. Equality with
the CPU's bits can only be asked of the right ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def fused(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of float32, rounded once.

    The product is exact in float64. Their sum is rounded to odd there (Boldo and Melquiond), which
    makes the second rounding, to 24 bits, that of the exact sum.
    """
    with np.errstate(all="ignore"):
        product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
        up = (error > 0) == (total > 0)
        odd = np.where(inexact, bits + np.where(up, 1, -1), bits).view(np.float64)
        return odd.astype(np.float32)


def widened(data: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """bfloat16, which the interpreter keeps as uint16, as float32."""
    if data.dtype != np.uint16:
        return data
    return (data.astype(np.uint32) << 16).view(np.float32)


def narrowed(data: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """float32 rounded to bfloat16, half to even, as uint16."""
    bits = data.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def mend() -> None:
    """Correct the interpreter, for the whole process."""
    import triton.language as tl  # noqa: PLC0415, only where triton is
    from triton.runtime import interpreter  # noqa: PLC0415

    def create_fma(self, x, y, z):
        if z.data.dtype == np.float32:
            return interpreter.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(widened(a.data), widened(b.data), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(narrowed(src.data), dst_type.scalar)
        return original_cast(self, src, dst_type)

    original_cast = interpreter.InterpreterBuilder.cast_impl
    interpreter.InterpreterBuilder.cast_impl = cast
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_dot = create_dot
