"""What is done to each row by itself, in Triton: norms, rotary positions and the store of keys and values, gates.

Every program does one row, or a piece of one, in one shape: bits do not depend on how many rows there are. `EARLY`:
a kernel may start while the one before it still runs, and waits for it before it reads or writes anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def norm_kernel(
    x_ptr, y_ptr, weight_ptr, out_ptr, size, eps, HAS_Y: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr
):
    """`out = rms_norm(x) * weight`, after `x += y` in place where there is a y."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, SIZE)
    inside = columns < size
    kept = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    x = kept.to(tl.float32)
    if HAS_Y:
        kept = (x + tl.load(y_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)).to(kept.dtype)
        tl.store(x_ptr + row + columns, kept, mask=inside)
        x = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, (x * scale * weight).to(kept.dtype), mask=inside)


@triton.jit
def gate_kernel(x_ptr, out_ptr, size, SIZE: tl.constexpr, EARLY: tl.constexpr):
    """`out = silu(gate) * up` of rows [gate | up], each `size` wide; program (row, piece)."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < size
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["source", "target", "part_stride"])
def copy_block_kernel(
    memory, pair, source, target, part_stride, size, SIZE: tl.constexpr, NAMED: tl.constexpr
):  # fmt: skip
    """Copy block `source` to block `target` of each part, which is all blocks of one head; program (part).

    With `NAMED` the two are those of `pair`.
    """
    if NAMED:
        source, target = tl.load(pair), tl.load(pair + 1)
    part = memory + tl.program_id(0).to(tl.int64) * part_stride
    columns = tl.arange(0, SIZE)
    inside = columns < size
    # Blocks of a part are counted in 64 bits too: with few layers a part is long.
    kept = tl.load(part + source.to(tl.int64) * size + columns, mask=inside)
    tl.store(part + target.to(tl.int64) * size + columns, kept, mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def turn_and_store_kernel(
    qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions, tables, q_ptr, keys_ptr, values_ptr,
    qkv_stride, table_stride, head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, NORM_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Bias, norm and turn the heads of a row [q | k | v]; queries to `q`, keys and values to their place in the pool.

    Values keep their length, or with `NORM_V` come to unit mean square. Without KV heads a row is queries alone.

    Program (row, `PARTS` heads). A row at position -1 is padding.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position < 0:
        return
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    real = (part < HEADS + 2 * KV_HEADS)[:, None]
    half: tl.constexpr = DIM // 2
    dims = tl.arange(0, half)
    in_row = part[:, None] * DIM + dims[None, :]
    at = row.to(tl.int64) * qkv_stride + in_row
    low = tl.load(qkv_ptr + at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + at + half, mask=real, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias_ptr + in_row, mask=real, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + in_row + half, mask=real, other=0.0).to(tl.float32)
    is_q = (part < HEADS)[:, None]
    is_v = (part >= HEADS + KV_HEADS)[:, None]
    normed_low, normed_high = low, high
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        q_low, k_low = tl.load(q_norm_ptr + dims).to(tl.float32), tl.load(k_norm_ptr + dims).to(tl.float32)
        q_high = tl.load(q_norm_ptr + half + dims).to(tl.float32)
        k_high = tl.load(k_norm_ptr + half + dims).to(tl.float32)
        if NORM_V:
            low, high = tl.where(is_v, low * scale, low), tl.where(is_v, high * scale, high)
        normed_low = low * scale * tl.where(is_q, q_low[None, :], k_low[None, :])
        normed_high = high * scale * tl.where(is_q, q_high[None, :], k_high[None, :])
    factors = row.to(tl.int64) * DIM + dims
    cos_low, cos_high = tl.load(cos_ptr + factors)[None, :], tl.load(cos_ptr + factors + half)[None, :]
    sin_low, sin_high = tl.load(sin_ptr + factors)[None, :], tl.load(sin_ptr + factors + half)[None, :]
    low = tl.where(is_v, low, normed_low * cos_low + normed_high * sin_low).to(q_ptr.dtype.element_ty)
    high = tl.where(is_v, high, normed_high * cos_high + normed_low * sin_high).to(q_ptr.dtype.element_ty)

    to_q = row.to(tl.int64) * HEADS * DIM + in_row
    tl.store(q_ptr + to_q, low, mask=is_q)
    tl.store(q_ptr + to_q + half, high, mask=is_q)
    block = tl.load(tables + row * table_stride + position // BLOCK).to(tl.int64)
    in_head = (block * BLOCK + position % BLOCK) * DIM + dims[None, :]
    to_k = (part - HEADS).to(tl.int64)[:, None] * head_stride + in_head
    is_k = (part >= HEADS)[:, None] & (part < HEADS + KV_HEADS)[:, None]
    tl.store(keys_ptr + to_k, low, mask=is_k)
    tl.store(keys_ptr + to_k + half, high, mask=is_k)
    to_v = (part - HEADS - KV_HEADS).to(tl.int64)[:, None] * head_stride + in_head
    tl.store(values_ptr + to_v, low, mask=is_v & real)
    tl.store(values_ptr + to_v + half, high, mask=is_v & real)
