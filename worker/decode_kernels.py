"""Decode attention on a CPU: one row and one key-value head at a time, over the blocks of a paged pool.

Each row in one fixed order, so its bits depend neither on the rows beside it nor on how the work is split. Where the
processor multiplies bfloat16 and the pool holds it, scores and sums are made on whole vectors: measured behind 1,500
tokens, one row of 30 layers took 5 ms for this without them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from worker.cpu_kernels import Floats, Ints, PoolRows, float_row, put_row, store_rows
from worker.vector_ops import PAIR_DIMENSIONS, SCORED_KEYS, mix_1, mix_2, mix_3, mix_4, score_row
from worker.vectors import HAS_PAIRS

_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")


@_kernel
def decode_rows(
    qkv: PoolRows,
    cos: Floats,
    sin: Floats,
    q_weight: Floats,
    k_weight: Floats,
    eps: float,
    keys: PoolRows,
    values: PoolRows,
    tokens: Ints,
    queries: Floats,
    tables: Ints,
    lengths: Ints,
    block_tokens: int,
    window: int,
    out: Floats,
) -> None:
    """`store_rows`, then `attend_rows` for all of them: one call is cheaper than two where there is little to do."""
    store_rows(qkv, cos, sin, q_weight, k_weight, eps, keys, values, tokens, queries)
    attend_rows(queries, keys, values, tables, lengths, block_tokens, window, 0, 1, out)


@_kernel
def attend_rows(
    queries: Floats,
    keys: PoolRows,
    values: PoolRows,
    tables: Ints,
    lengths: Ints,
    block_tokens: int,
    window: int,
    start: int,
    step: int,
    out: Floats,
) -> None:
    """Decode attention of one layer, over every `step`-th pair of a row and a key-value head from `start` on.

    queries [heads, rows, dim] and keys and values as `store_rows` leaves them; tables [lengths, blocks]; lengths: the
    position of each new token; window: how many tokens a row sees, itself the last of them; out [rows, heads, dim],
    of which the rows past the lengths are left alone.
    """
    kv_heads, _, dim = keys.shape
    group = len(queries) // kv_heads
    scale = np.float32(1.0 / math.sqrt(dim))
    query = np.empty((group, dim), np.float32)
    scores = np.empty((group, lengths.max() + 1), np.float32)
    for task in range(start, len(lengths) * kv_heads, step):
        row, kv_head = task // kv_heads, task % kv_heads
        length = lengths[row]
        first = kv_head * group
        for member in range(group):
            for i in range(dim):
                query[member, i] = queries[first + member, row, i] * scale
        mixed = out[row, first : first + group]
        attend_head(
            query, keys[kv_head], values[kv_head], tables[row], length, block_tokens, window, scores, mixed
        )


@_kernel
def attend_head(
    query: Floats,
    keys: PoolRows,
    values: PoolRows,
    table: Ints,
    length: int,
    block_tokens: int,
    window: int,
    scores: Floats,
    out: Floats,
) -> None:
    """One row's attention in one key-value head: `query` [group, dim], scaled, to out [group, dim].

    keys, values [pool tokens, dim]; scores [group, length + 1 or more] is room to work in.
    """
    first = max(length + 1 - window, 0)
    if (
        HAS_PAIRS
        and keys.itemsize == 2
        and query.shape[1] % PAIR_DIMENSIONS == 0
        and block_tokens % SCORED_KEYS == 0
    ):
        _attend_pairs(query, keys, values, table, first, length, block_tokens, out)
        return
    _score(query, keys, table, first, length, block_tokens, scores)
    for member in range(len(query)):
        _softmax(scores[member], length + 1 - first)
    _mix(scores, values, table, first, length, block_tokens, out)


@_kernel
def _attend_pairs(
    query: Floats,
    keys: PoolRows,
    values: PoolRows,
    table: Ints,
    first: int,
    length: int,
    block_tokens: int,
    out: Floats,
) -> None:
    """`attend_head` over tokens [first, length] of a bfloat16 pool, whole blocks at a time."""
    group, dim = query.shape
    begin = first // block_tokens
    tokens = (length // block_tokens + 1 - begin) * block_tokens
    low, high = first - begin * block_tokens, length + 1 - begin * block_tokens
    queries = np.empty((group, dim), np.uint16)
    scores = np.empty((group, tokens), np.float32)
    weights = np.empty((group, tokens), np.uint16)
    for member in range(group):
        put_row(query[member], queries[member])
        at, to = queries[member].ctypes.data, scores[member].ctypes.data
        for block in range(tokens // block_tokens):
            rows = keys[table[begin + block] * block_tokens :].ctypes.data
            for key in range(0, block_tokens, SCORED_KEYS):
                score_row(at, rows + key * dim * 2, dim, to + (block * block_tokens + key) * 4)
        _softmax(scores[member, low:high], high - low)
        scores[member, :low] = np.float32(0)
        scores[member, high:] = np.float32(0)
        put_row(scores[member], weights[member])
    sums = np.empty((4, PAIR_DIMENSIONS), np.float32)
    for start in range(0, dim, PAIR_DIMENSIONS):
        member = 0
        while member < group:
            sums[:] = np.float32(0)
            count = min(group - member, 4)
            for block in range(tokens // block_tokens):
                at = weights[member, block * block_tokens :].ctypes.data
                rows = values[table[begin + block] * block_tokens, start:].ctypes.data
                if count == 4:
                    mix_4(at, tokens * 2, rows, dim * 2, block_tokens, sums.ctypes.data)
                elif count == 3:
                    mix_3(at, tokens * 2, rows, dim * 2, block_tokens, sums.ctypes.data)
                elif count == 2:
                    mix_2(at, tokens * 2, rows, dim * 2, block_tokens, sums.ctypes.data)
                else:
                    mix_1(at, tokens * 2, rows, dim * 2, block_tokens, sums.ctypes.data)
            for i in range(count):
                out[member + i, start : start + PAIR_DIMENSIONS] = sums[i]
            member += count


@_kernel
def _score(
    query: Floats, keys: PoolRows, table: Ints, first: int, length: int, block_tokens: int, scores: Floats
) -> None:
    """scores[member, t - first] = query[member] . key of token t, for t from `first` up to and with `length`."""
    group, dim = query.shape
    widened = np.empty(dim, np.float32)
    for block in range(first // block_tokens, length // block_tokens + 1):
        start = block * block_tokens
        base = table[block] * block_tokens
        for t in range(max(first - start, 0), min(block_tokens, length + 1 - start)):
            key = float_row(keys[base + t], widened)
            for member in range(group):
                total = np.float32(0)
                for i in range(dim):
                    total += query[member, i] * key[i]
                scores[member, start + t - first] = total


@_kernel
def _softmax(scores: Floats, count: int) -> None:
    most = scores[0]
    for t in range(1, count):
        most = max(most, scores[t])
    total = np.float32(0)
    for t in range(count):
        scores[t] = _exp(scores[t] - most)
    for t in range(count):
        total += scores[t]
    factor = np.float32(1) / total
    for t in range(count):
        scores[t] *= factor


@_inlined
def _exp(x: np.float32) -> np.float32:
    """e ** x for x <= 0 within 2 units in the last place, in a form that vectorises.

    Split into 2 ** n times e ** r with |r| <= ln(2) / 2, and a Taylor polynomial of degree 7 for the latter.
    """
    clamped = max(x, np.float32(-87.0))
    n = np.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    r = clamped - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return np.float32(p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))


@_kernel
def _mix(
    weights: Floats, values: PoolRows, table: Ints, first: int, length: int, block_tokens: int, out: Floats
) -> None:
    """out[member] = sum over t of weights[member, t - first] * value of token t."""
    group, dim = out.shape
    widened = np.empty(dim, np.float32)
    out[:] = np.float32(0)
    for block in range(first // block_tokens, length // block_tokens + 1):
        start = block * block_tokens
        base = table[block] * block_tokens
        for t in range(max(first - start, 0), min(block_tokens, length + 1 - start)):
            value = float_row(values[base + t], widened)
            for member in range(group):
                weight = weights[member, start + t - first]
                for i in range(dim):
                    out[member, i] += weight * value[i]
