"""Paged attention in Triton. A query row's bits depend on its own keys alone, wherever it stands and beside whom.

Keys are walked in one order in tiles that start at absolute multiples, and in splits that do too. Each split is
closed on its own and splits are merged in rising order, by the program that walked them all or by another kernel:
the operations are the same, and written so that the compiler has no sum of products left to contract as it likes.
Tiles of which a row sees nothing leave its sums as they are, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _safe(top):
    """`top`, or 0 where nothing was seen yet: the exponent of a difference from it is then 0, not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _lowest(position, WINDOW: tl.constexpr):
    """The first token that a row at `position` sees."""
    return tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else 0


@triton.jit
def _merged(top, total, acc, new_top, new_total, new_acc, ROWS: tl.constexpr, DIM: tl.constexpr):
    """What two neighbouring splits give together, the later one second."""
    best = tl.maximum(top, new_top)
    kept = tl.exp2(top - _safe(best))
    added = tl.exp2(new_top - _safe(best))
    total = tl.fma(total, kept, new_total * added)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], (ROWS, DIM)), new_acc * added[:, None])
    return best, total, acc


@triton.jit
def _mean(acc, total, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The sums as an output row; zeros where nothing was seen."""
    return tl.div_rn(acc, tl.broadcast_to(tl.where(total > 0, total, 1.0)[:, None], (ROWS, DIM)))


@triton.jit
def _walk(
    q, keys, values, table, begin, end, limits, whole, opening, stop, scale, top, total, acc,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the keys of [begin, end), whole tiles, to the sums; from `whole` on only those up to each row's limit.

    Of tiles that begin before `opening` only those that lie in each row's window, where there is one.

    Measured on an H100: one loop with the mask as a branch takes a tenth less than a loop without mask and one with.
    """
    offsets = tl.arange(0, KEYS)
    in_block = (offsets % BLOCK)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    for first in tl.range(begin, end, KEYS):
        position = first + offsets
        block = tl.load(table + first // BLOCK + offsets // BLOCK)  # a tile starts at the start of a block
        at = (block * (BLOCK * DIM))[:, None] + in_block
        k = tl.load(keys + at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW > 0:
            if (first >= whole) | (first < opening):
                back = limits[:, None] - position[None, :]
                scores = tl.where((back >= 0) & (back < WINDOW), scores, float("-inf"))
        elif first >= whole:
            scores = tl.where(position[None, :] <= limits[:, None], scores, float("-inf"))
        best = tl.maximum(top, tl.max(scores, 1) * scale)
        lowered = tl.broadcast_to((-_safe(best))[:, None], (ROWS, KEYS))
        weights = tl.exp2(tl.fma(scores, tl.full((ROWS, KEYS), scale, tl.float32), lowered))
        kept = tl.exp2(top - _safe(best))
        total = tl.fma(total, kept, tl.sum(weights, 1))
        # Past the sequence's end may lie anything, and 0 times NaN is NaN.
        v = tl.load(values + at, mask=(position < stop)[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        top = best
    return top, total, acc


@triton.jit(do_not_specialize=["capacity", "each"])
def prefill_kernel(
    q_ptr, keys_ptr, values_ptr, table, span_ptr, out_ptr, part_ptr, sums_ptr, capacity, each, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Causal attention of tokens of one sequence; program (tile, KV head, run of `each` splits).

    With a `WINDOW` a row sees so many tokens, its own the last of them, and nothing before is read; 0 is none.

    `span` holds where they start and how many they are, at most `capacity`. The heads of a group share a tile. Where
    one program walks all splits it writes `out`, and may use `part` [capacity, heads, dim]; else, `each` being 1, the
    parts [splits, capacity, heads, dim] and their sums [splits, 2, capacity, heads] go to `merge_kernel`.
    """
    start = tl.load(span_ptr)
    rows = tl.load(span_ptr + 1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    index = tile * ROWS + tl.arange(0, ROWS)
    token = index // GROUP
    real = token < rows
    of_head = head * GROUP + index % GROUP
    limits = start + tl.minimum(token, rows - 1)
    first_token = (tile * ROWS) // GROUP
    last_token = tl.minimum((tile * ROWS + ROWS - 1) // GROUP, rows - 1)
    whole = (start + first_token + 1) // KEYS * KEYS  # before it every row sees all keys of a tile
    stop = start + last_token + 1
    lowest = _lowest(start + first_token, WINDOW)
    opening = _lowest(stop - 1, WINDOW)
    first = tl.maximum(tl.program_id(2) * each, lowest // SPLIT)
    last = tl.minimum(tl.program_id(2) * each + each, (stop + SPLIT - 1) // SPLIT)
    if (first >= last) | (first_token >= rows):
        return
    dims = tl.arange(0, DIM)
    at = (token * HEADS + of_head)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)
    keys = keys_ptr + head.to(tl.int64) * head_stride
    values = values_ptr + head.to(tl.int64) * head_stride

    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    for split in range(first, last):
        begin = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
        end = tl.minimum(split * SPLIT + SPLIT, stop)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM), tl.float32)
        top, total, acc = _walk(
            q, keys, values, table, begin, end, limits, whole, opening, stop, scale, top, total, acc,
            ROWS, KEYS, BLOCK, DIM, WINDOW,
        )  # fmt: skip
        # Between splits the sums so far wait in memory: registers hold one accumulator, not two.
        if split > first:
            tl.debug_barrier()
            before = tl.load(part_ptr + at, mask=real[:, None], other=0.0)
            all_top, all_total, acc = _merged(all_top, all_total, before, top, total, acc, ROWS, DIM)
        else:
            all_top = top
            all_total = total
        if split + 1 < last:
            tl.store(part_ptr + at, acc, mask=real[:, None])
        elif tl.num_programs(2) == 1:
            out = _mean(acc, all_total, ROWS, DIM)
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
        else:
            step = tl.cast(split, tl.int64) * capacity * HEADS
            tl.store(part_ptr + step * DIM + at, acc, mask=real[:, None])
            sums = sums_ptr + 2 * step + token * HEADS + of_head
            tl.store(sums, all_top, mask=real)
            tl.store(sums + capacity * HEADS, all_total, mask=real)


@triton.jit(do_not_specialize=["capacity"])
def merge_kernel(
    part_ptr, sums_ptr, span_ptr, out_ptr, capacity,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What `prefill_kernel` does with its splits, from their parts; program (token, `ROWS` heads)."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    start = tl.load(span_ptr)
    token = tl.program_id(0)
    if token >= tl.load(span_ptr + 1):
        return
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = head < HEADS
    dims = tl.arange(0, DIM)
    at = (token * HEADS + head)[:, None] * DIM + dims[None, :]
    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_acc = tl.zeros((ROWS, DIM), tl.float32)
    for split in range(_lowest(start + token, WINDOW) // SPLIT, (start + token) // SPLIT + 1):
        step = tl.cast(split, tl.int64) * capacity * HEADS
        sums = sums_ptr + 2 * step + token * HEADS + head
        top = tl.load(sums, mask=real, other=float("-inf"))
        total = tl.load(sums + capacity * HEADS, mask=real, other=0.0)
        acc = tl.load(part_ptr + step * DIM + at, mask=real[:, None], other=0.0)
        all_top, all_total, all_acc = _merged(all_top, all_total, all_acc, top, total, acc, ROWS, DIM)
    out = _mean(all_acc, all_total, ROWS, DIM)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_ptr, keys_ptr, values_ptr, tables, positions, part_ptr, sums_ptr, table_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token a sequence; program (sequence, KV head, split). A sequence at position -1 is padding.

    Parts [sequences, splits, heads, dim] and their sums [sequences, splits, 2, heads], for `decode_merge_kernel`.
    `EARLY`: it may start while the kernel before it still runs, and waits for it first.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row)
    lowest = _lowest(position, WINDOW)
    if (split * SPLIT > position) | (split * SPLIT + SPLIT <= lowest):
        return
    begin = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
    index = tl.arange(0, ROWS)
    real = index < GROUP
    of_head = head * GROUP + index
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + (row * HEADS + of_head)[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
    keys = keys_ptr + head.to(tl.int64) * head_stride
    values = values_ptr + head.to(tl.int64) * head_stride
    stop = position + 1
    limits = tl.zeros((ROWS,), tl.int32) + position
    top, total, acc = _walk(
        q, keys, values, tables + row * table_stride, begin, tl.minimum(split * SPLIT + SPLIT, stop),
        limits, begin, begin, stop, scale,
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, DIM), tl.float32),
        ROWS, KEYS, BLOCK, DIM, WINDOW,
    )  # fmt: skip
    part = (row * tl.num_programs(2) + split).to(tl.int64)
    tl.store(part_ptr + part * HEADS * DIM + of_head[:, None] * DIM + dims[None, :], acc, mask=real[:, None])
    sums = sums_ptr + part * 2 * HEADS + of_head
    tl.store(sums, top, mask=real)
    tl.store(sums + HEADS, total, mask=real)


@triton.jit(do_not_specialize=["splits"])
def decode_merge_kernel(
    part_ptr, sums_ptr, positions, out_ptr, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The output of one head of one sequence from its parts, `STEP` at a time; program (sequence, head)."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    used = (position + SPLIT) // SPLIT  # none where the position is -1
    lowest = _lowest(position, WINDOW) // SPLIT
    dims = tl.arange(0, DIM)
    best = float("-inf")
    for first in range(lowest, used, STEP):
        split = first + tl.arange(0, STEP)
        sums = sums_ptr + (row * splits + split).to(tl.int64) * 2 * HEADS + head
        best = tl.maximum(best, tl.max(tl.load(sums, mask=split < used, other=float("-inf")), 0))
    total = 0.0
    acc = tl.zeros((DIM,), tl.float32)
    for first in range(lowest, used, STEP):
        split = first + tl.arange(0, STEP)
        there = split < used
        part = (row * splits + split).to(tl.int64)
        sums = sums_ptr + part * 2 * HEADS + head
        weight = tl.exp2(tl.load(sums, mask=there, other=float("-inf")) - _safe(best))
        total += tl.sum(tl.load(sums + HEADS, mask=there, other=0.0) * weight, 0)
        at = part[:, None] * HEADS * DIM + head * DIM + dims[None, :]
        acc += tl.sum(tl.load(part_ptr + at, mask=there[:, None], other=0.0) * weight[:, None], 0)
    out = tl.div_rn(acc, tl.zeros((DIM,), tl.float32) + tl.where(used > 0, total, 1.0))
    tl.store(out_ptr + (row * HEADS + head) * DIM + dims, out.to(out_ptr.dtype.element_ty))
