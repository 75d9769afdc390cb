"""Kernels for float32 rows on a CPU, compiled by Numba: what is too small for a library call to pay.

A decode step of a small model is hundreds of tiny operations, and dispatching each through torch cost a third of
the step (11 of 38 ms at one row of 30 layers, measured). Each kernel here works on one row at a time in one fixed
order, so a row's bits cannot depend on the rows beside it. They run on the calling thread alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
PoolRows = NDArray[np.float32] | NDArray[np.uint16]

# Pools of bfloat16 are seen as uint16, which NumPy knows: the upper half of a float32.
# Sums may be reordered by the compiler to use vector registers: once, at compile time, the same for every row.
_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")


@_kernel
def rms_norm_rows(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out[row] = x[row] / sqrt(mean(x[row] ** 2) + eps) * weight, for x and out [rows, size]."""
    size = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        norm_row(x[row], weight, np.float32(eps), size, out[row])


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
    _score(query, keys, table, first, length, block_tokens, scores)
    for member in range(len(query)):
        _softmax(scores[member], length + 1 - first)
    _mix(scores, values, table, first, length, block_tokens, out)


@_kernel
def store_rows(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    q_weight: Floats,
    k_weight: Floats,
    eps: float,
    keys: PoolRows,
    values: PoolRows,
    tokens: Ints,
    queries: Floats,
) -> None:
    """The part of a layer before attention: norm and turn q and k, store k and v of the real rows.

    qkv [rows, heads + 2 * kv_heads, dim], or [rows, heads, dim] where keys and values are there already; cos, sin
    [rows, dim] as `Rotary` gives them; q_weight, k_weight [dim], or [0] where heads have no norm; keys, values: the
    pool [kv_heads, tokens, dim], of float32 or of bfloat16 seen as uint16; tokens: the pool token of each real row,
    rows past them are padding, as all are where nothing is stored; queries [heads, rows, dim] takes the turned
    queries of all rows.
    """
    heads, rows, dim = queries.shape
    kv_heads = keys.shape[0]
    turned = np.empty(dim, np.float32)
    for row in range(rows):
        for head in range(heads):
            turn_head(qkv[row, head], cos[row], sin[row], q_weight, np.float32(eps), queries[head, row])
    for row in range(len(tokens)):
        token = tokens[row]
        for head in range(kv_heads):
            turn_head(qkv[row, heads + head], cos[row], sin[row], k_weight, np.float32(eps), turned)
            put_row(turned, keys[head, token])
            put_row(qkv[row, heads + kv_heads + head], values[head, token])


@_kernel
def rotary_factors(positions: Ints, frequencies: Floats, cos: Floats, sin: Floats) -> None:
    """cos and sin [rows, 2 * pairs] of positions [rows] and frequencies [pairs], as `Rotary` describes them."""
    pairs = len(frequencies)
    for row in range(len(positions)):
        position = np.float32(positions[row])
        for i in range(pairs):
            angle = np.float64(position * frequencies[i])
            across, along = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            cos[row, i] = across
            cos[row, pairs + i] = across
            sin[row, i] = -along
            sin[row, pairs + i] = along


def _floats(row: Any, widened: Any) -> Any:
    """A row of the pool in float32: itself, or in `widened` where the pool holds bfloat16."""
    raise NotImplementedError("for compiled code only")


@overload(_floats)
def _floats_of(row: Any, widened: Any) -> Any:
    def same(row: Any, widened: Any) -> Any:
        return row

    def widen(row: Any, widened: Any) -> Any:
        bits = widened.view(np.uint32)
        for i in range(len(row)):
            bits[i] = np.uint32(row[i]) << np.uint32(16)
        return widened

    return widen if row.dtype is types.uint16 else same


def put_row(x: Any, row: Any) -> None:
    """Write float32 `x` to a row of the pool, rounded to nearest even where that holds bfloat16."""
    raise NotImplementedError("for compiled code only")


@overload(put_row)
def _put_row_into(x: Any, row: Any) -> Any:
    def copy(x: Any, row: Any) -> None:
        row[:] = x

    def narrow(x: Any, row: Any) -> None:
        bits = x.view(np.uint32)
        for i in range(len(row)):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            row[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return narrow if row.dtype is types.uint16 else copy


@_inlined
def norm_row(x: Floats, weight: Floats, eps: np.float32, size: np.float32, out: Floats) -> None:
    """out = x / sqrt(mean(x ** 2) + eps) * weight; size: of x."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / size + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@_kernel
def turn_head(x: Floats, cos: Floats, sin: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Rotate one head vector, after its norm where it has one."""
    dim = len(x)
    half = dim // 2
    if len(weight):
        normed = np.empty(dim, np.float32)
        norm_row(x, weight, eps, np.float32(dim), normed)
        x = normed
    for i in range(half):
        out[i] = x[i] * cos[i] + x[half + i] * sin[i]
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i]


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
            key = _floats(keys[base + t], widened)
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
            value = _floats(values[base + t], widened)
            for member in range(group):
                weight = weights[member, start + t - first]
                for i in range(dim):
                    out[member, i] += weight * value[i]
