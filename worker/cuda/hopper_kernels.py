"""Prefill attention for Hopper in Gluon, in the order of sums of `attention_kernels`: its bits depend on the row alone.

A warp brings keys and values to shared memory, two groups of warps have half of the query rows each: while one of them
waits for its products, the scores of a tile and the values of the one before it, the other computes exponents.

Measured on an H200 with heads of 128: no slower than programs that take tiles in turn, groups that give way to each
other by barriers, and exponents computed while the same group's values are added, which costs a tenth.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

HALF = gl.constexpr(
    64
)  # query rows of one group of warps; also the columns that 128 bytes of swizzled memory hold
WARPS = gl.constexpr(4)


@gluon.jit
def _safe(top):
    """`top`, or 0 where nothing was seen yet: the exponent of a difference from it is then 0, not NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _nothing():
    """0, of which the compiler knows nothing: what is computed from it is computed where it stands."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _soften(scores, limits, first, scale, top, total, MASKED: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """Weights of one tile of scores; the new maximum and sum, and the factor of what was before."""
    if MASKED:
        position = first + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        scores = gl.where(position[None, :] <= limits[:, None], scores, float("-inf"))
    best = gl.maximum(top, gl.max(scores, 1) * scale)
    lowered = -_safe(best)
    wide = gl.zeros_like(scores)
    weights = gl.exp2(gl.fma(scores, wide + scale, wide + lowered[:, None]))
    kept = gl.exp2(top + lowered)
    total = gl.fma(total, kept, gl.sum(weights, 1))
    return weights, best, total, kept


@gluon.jit
def _produce(
    pool, table, k_mem, v_mem, k_full, k_free, v_full, v_free, first, last, stop, k_row, v_row,
    DIM: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring all tiles of keys and values to shared memory, in order."""
    PIECES: gl.constexpr = KEYS // BLOCK
    HALVES: gl.constexpr = DIM // HALF
    layout: gl.constexpr = pool.layout
    # Memory that 128 bytes a row are swizzled in: a block of one half of the columns lies in one piece.
    k_parts = k_mem._reinterpret(pool.dtype, [STAGES * HALVES * PIECES, BLOCK, HALF], layout)
    v_parts = v_mem._reinterpret(pool.dtype, [STAGES * HALVES * PIECES, BLOCK, HALF], layout)
    begin = first * SPLIT
    end = gl.minimum(last * SPLIT, stop)
    tiles = (end - begin + KEYS - 1) // KEYS
    for index in range(tiles):
        stage = index % STAGES
        parity = (index // STAGES) & 1
        at = table + (begin + index * KEYS) // BLOCK
        mbarrier.wait(k_free.index(stage), parity ^ 1)
        mbarrier.expect(k_full.index(stage), KEYS * DIM * 2)
        for piece in gl.static_range(PIECES):
            row = gl.load(at + piece) * BLOCK
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    pool, [k_row + row, half * HALF], k_full.index(stage),
                    k_parts.index((stage * HALVES + half) * PIECES + piece),
                )  # fmt: skip
        mbarrier.wait(v_free.index(stage), parity ^ 1)
        mbarrier.expect(v_full.index(stage), KEYS * DIM * 2)
        for piece in gl.static_range(PIECES):
            row = gl.load(at + piece) * BLOCK
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    pool, [v_row + row, half * HALF], v_full.index(stage),
                    v_parts.index((stage * HALVES + half) * PIECES + piece),
                )  # fmt: skip


@gluon.jit
def _step(
    q, k_mem, v_mem, k_full, k_free, v_full, v_free, tile, first, limits, scale, weights, top, total, acc,
    MASKED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Scores of tile `tile` while the values of the tile before it are added."""
    stage = tile % STAGES
    parity = (tile // STAGES) & 1
    before = (tile - 1) % STAGES
    mbarrier.wait(k_full.index(stage), parity)
    zeros = gl.zeros([HALF, KEYS], gl.float32, S)
    scores = warpgroup_mma(q, k_mem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((tile - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_mem.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(stage), count=1)
    new, top, total, kept = _soften(scores, limits, first, scale, top, total, MASKED, KEYS, S)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(new.to(q.dtype), P)
    return weights, top, total, acc


@gluon.jit
def _consume(
    q_ptr, out_ptr, part_ptr, sums_ptr, q_mem, k_mem, v_mem, k_full, k_free, v_full, v_free,
    first, last, stop, whole, start, rows, row_tile, head, capacity, alone, scale,
    PART: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The attention of `HALF` query rows: those of one group of warps."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    base = row_tile * (2 * HALF) + PART * HALF

    index = base + gl.arange(0, HALF, gl.SliceLayout(1, LOAD))
    at = (index // GROUP * HEADS + head * GROUP + index % GROUP)[:, None] * DIM
    at += gl.arange(0, DIM, gl.SliceLayout(0, LOAD))[None, :]
    q = q_mem.index(PART)
    q.store(gl.load(q_ptr + at, mask=(index // GROUP < rows)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    index = base + gl.arange(0, HALF, gl.SliceLayout(1, S))
    limits = start + gl.minimum(index // GROUP, rows - 1)

    all_top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    all_total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
    tile = 0
    for split in range(first, last):
        begin = split * SPLIT
        end = gl.minimum(begin + SPLIT, stop)
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([HALF, DIM], gl.float32, A)
        # The first tile alone, as nothing is there to be added meanwhile.
        stage = tile % STAGES
        mbarrier.wait(k_full.index(stage), (tile // STAGES) & 1)
        zeros = gl.zeros([HALF, KEYS], gl.float32, S)
        scores = warpgroup_mma(q, k_mem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        new, top, total, kept = _soften(scores, limits, begin, scale, top, total, True, KEYS, S)
        weights = gl.convert_layout(new.to(q.dtype), P)
        tile += 1
        seen = gl.maximum(gl.minimum(end, whole), begin + KEYS)
        for key in range(begin + KEYS, seen, KEYS):
            weights, top, total, acc = _step(
                q, k_mem, v_mem, k_full, k_free, v_full, v_free, tile, key, limits, scale,
                weights, top, total, acc, False, KEYS, STAGES, S, P,
            )  # fmt: skip
            tile += 1
        for key in range(seen, end, KEYS):
            weights, top, total, acc = _step(
                q, k_mem, v_mem, k_full, k_free, v_full, v_free, tile, key, limits, scale,
                weights, top, total, acc, True, KEYS, STAGES, S, P,
            )  # fmt: skip
            tile += 1
        stage = (tile - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((tile - 1) // STAGES) & 1)
        tail = (end - 1) // KEYS * KEYS
        if tail + KEYS > stop:
            # Past the sequence's end may lie anything, and 0 times NaN is NaN. Both halves do the same here.
            position = tail + gl.arange(0, KEYS, gl.SliceLayout(1, LOAD))
            there = v_mem.index(stage).load(LOAD)
            v_mem.index(stage).store(gl.where((position < stop)[:, None], there, gl.zeros_like(there)))
            fence_async_shared()
            gl.thread_barrier()
        acc = warpgroup_mma(weights, v_mem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(stage), count=1)

        # Made here, not once before: while tiles are walked there are no registers to keep it in.
        query = base + _nothing() + gl.arange(0, HALF, gl.SliceLayout(1, A))
        real = query // GROUP < rows
        row = query // GROUP * HEADS + head * GROUP + query % GROUP
        dims = gl.arange(0, DIM, gl.SliceLayout(0, A))[None, :]

        if split > first:
            best = gl.maximum(all_top, top)
            kept = gl.exp2(all_top - _safe(best))
            added = gl.exp2(top - _safe(best))
            all_total = gl.fma(all_total, kept, total * added)
            all_top = best
            before = gl.load((part_ptr + row * DIM)[:, None] + dims, mask=real[:, None], other=0.0)
            of_rows = gl.convert_layout(kept, gl.SliceLayout(1, A))
            of_added = gl.convert_layout(added, gl.SliceLayout(1, A))
            acc = gl.fma(before, gl.zeros_like(acc) + of_rows[:, None], acc * of_added[:, None])
        else:
            all_top = top
            all_total = total
        if split + 1 < last:
            gl.store((part_ptr + row * DIM)[:, None] + dims, acc, mask=real[:, None])
        elif alone:
            sums = gl.convert_layout(gl.where(all_total > 0, all_total, 1.0), gl.SliceLayout(1, A))
            out = gl.div_rn(acc, gl.zeros_like(acc) + sums[:, None])
            gl.store((out_ptr + row * DIM)[:, None] + dims, out.to(q.dtype), mask=real[:, None])
        else:
            step = gl.cast(split, gl.int64) * capacity * HEADS
            gl.store((part_ptr + step * DIM + row * DIM)[:, None] + dims, acc, mask=real[:, None])
            to = sums_ptr + 2 * step + row
            gl.store(to, gl.convert_layout(all_top, gl.SliceLayout(1, A)), mask=real)
            gl.store(to + capacity * HEADS, gl.convert_layout(all_total, gl.SliceLayout(1, A)), mask=real)


@gluon.jit(do_not_specialize=["capacity", "each"])
def prefill_kernel(
    q_ptr, pool, table, span_ptr, out_ptr, part_ptr, sums_ptr, capacity, each, head_rows, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Causal attention of tokens of one sequence; program (tile of 128 rows, KV head, run of `each` splits).

    Arguments and results are those of `attention_kernels.prefill_kernel`, but for `pool`: keys and values of a layer
    as rows [2 * kv_heads * blocks * block, dim], `head_rows` to a head.
    """
    start = gl.load(span_ptr)
    rows = gl.load(span_ptr + 1)
    row_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    ROWS: gl.constexpr = 2 * HALF
    first_token = (row_tile * ROWS) // GROUP
    last_token = gl.minimum((row_tile * ROWS + ROWS - 1) // GROUP, rows - 1)
    whole = (start + first_token + 1) // KEYS * KEYS
    stop = start + last_token + 1
    first = gl.program_id(2) * each
    last = gl.minimum(first + each, (stop + SPLIT - 1) // SPLIT)
    last = gl.where(first_token < rows, gl.maximum(last, first), first)
    alone = gl.num_programs(2) == 1

    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_mem = gl.allocate_shared_memory(pool.dtype, [2, HALF, DIM], layout)
    k_mem = gl.allocate_shared_memory(pool.dtype, [STAGES, KEYS, DIM], layout)
    v_mem = gl.allocate_shared_memory(pool.dtype, [STAGES, KEYS, DIM], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()

    k_row = head * head_rows
    v_row = (gl.num_programs(1) + head) * head_rows
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ptr, out_ptr, part_ptr, sums_ptr, q_mem, k_mem, v_mem, k_full, k_free, v_full, v_free,
                    first, last, stop, whole, start, rows, row_tile, head, capacity, alone, scale,
                    0, HEADS, GROUP, DIM, SPLIT, KEYS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    q_ptr, out_ptr, part_ptr, sums_ptr, q_mem, k_mem, v_mem, k_full, k_free, v_full, v_free,
                    first, last, stop, whole, start, rows, row_tile, head, capacity, alone, scale,
                    1, HEADS, GROUP, DIM, SPLIT, KEYS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    pool, table, k_mem, v_mem, k_full, k_free, v_full, v_free, first, last, stop, k_row, v_row,
                    DIM, BLOCK, SPLIT, KEYS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
