"""What is done to each row by itself in models of mixed layers, in Triton.

As in `row_kernels.py` every program does one row, or a piece of one, in one shape.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

# gelu(x) = x * sigmoid(x * (a + b * x ** 2)), its hyperbolic tangent written as a sigmoid
_GELU_A = tl.constexpr(1.5957691216057308)
_GELU_B = tl.constexpr(0.07135481282659891)


@triton.jit
def gate_kernel(
    gate_ptr,
    x_ptr,
    out_ptr,
    size,
    gate_stride,
    x_stride,
    GELU: tl.constexpr,
    SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`out = sigmoid(gate) * x`, or `gelu(gate) * x` in the tanh form, `size` wide; program (row, piece)."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < size
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    factor = gate * tl.sigmoid(gate * (_GELU_A + _GELU_B * gate * gate)) if GELU else tl.sigmoid(gate)
    tl.store(out_ptr + row * size + columns, (factor * x).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    x_ptr, y_ptr, after_ptr, before_ptr, out_ptr, size, eps, factor,
    HAS_OUT: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`x = (x + rms_norm(y) * after) * factor` in place, then `out = rms_norm(x) * before`; program: row."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, SIZE)
    inside = columns < size
    y = tl.load(y_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(after_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    x = (x + y * tl.rsqrt(tl.sum(y * y, 0) / size + eps) * after) * factor
    kept = x.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row + columns, kept, mask=inside)
    if HAS_OUT:
        x = kept.to(tl.float32)
        before = tl.load(before_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        out = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * before
        tl.store(out_ptr + row + columns, out.to(kept.dtype), mask=inside)
