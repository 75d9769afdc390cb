"""Products of a few rows with a weight matrix, in Triton: as fast as the weights can be read.

Each program walks the whole depth in one order, so a row's bits depend neither on the other rows nor on their number.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

_LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache


@triton.jit
def _prefetch(at):
    """Bring the lines at these addresses to the second-level cache."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x_ptr, weight_ptr, other_ptr, out_ptr, rows, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, PLUS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`out = x @ weight.T` for x [rows, inputs] and weight [outputs, inputs]; program: `COLUMNS` outputs.

    `PLUS` adds `other` [rows, outputs]. `GATED`: weight [2 * outputs, inputs] holds a gate's rows, then those of what
    it gates: `out = silu(x @ gate.T) * (x @ up.T)`. `EVEN`: columns and depth divide the sizes. `EARLY`: it starts
    while the kernel before it still runs, and has the first `AHEAD` inputs' weights brought to the cache meanwhile.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * inputs + depth[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * inputs + depth[None, :]
    to_up = tl.cast(outputs, tl.int64) * inputs
    real = (row < rows)[:, None]
    inside = (column < outputs)[:, None]
    if EARLY:
        cuda.gdc_launch_dependents()
        if EVEN and AHEAD > 0:
            lines = tl.arange(0, AHEAD // _LINE) * _LINE
            first_at = weight_ptr + column.to(tl.int64)[:, None] * inputs + lines[None, :]
            _prefetch(first_at)
            if GATED:
                _prefetch(first_at + to_up)
        cuda.gdc_wait()
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    for first in tl.range(0, inputs, DEPTH):
        if EVEN:
            w = tl.load(weight_at + first, eviction_policy="evict_first")
            x = tl.load(x_at + first, mask=real, other=0.0)
        else:
            within = (first + depth < inputs)[None, :]
            w = tl.load(weight_at + first, mask=inside & within, other=0.0)
            x = tl.load(x_at + first, mask=real & within, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(weight_at + to_up + first, eviction_policy="evict_first")
            else:
                w = tl.load(weight_at + to_up + first, mask=inside & within, other=0.0)
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    to = row[None, :] * outputs + column[:, None]
    written = (row < rows)[None, :] & inside
    if PLUS:
        acc += tl.load(other_ptr + to, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=written)
