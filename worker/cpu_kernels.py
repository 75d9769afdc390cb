"""Kernels for float32 rows on a CPU, compiled by Numba: what is too small for a library call to pay.

A decode step of a small model is hundreds of tiny operations, and dispatching each through torch cost a third of
the step (11 of 38 ms at one row of 30 layers, measured). Each kernel here works on one row at a time in one fixed
order, so a row's bits cannot depend on the rows beside it. They run on the calling thread alone.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Sums may be reordered by the compiler to use vector registers: once, at compile time, the same for every row.
_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")


@_kernel
def rms_norm_rows(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """out[row] = x[row] / sqrt(mean(x[row] ** 2) + eps) * weight, for x and out [rows, size]."""
    size = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        _norm(x[row], weight, np.float32(eps), size, out[row])


@_kernel
def attend_rows(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    q_weight: Floats,
    k_weight: Floats,
    eps: float,
    keys: Floats,
    values: Floats,
    tables: Ints,
    lengths: Ints,
    block_tokens: int,
    window: int,
    out: Floats,
) -> None:
    """Decode attention of one layer: norm and turn q and k, store k and v, attend over the blocks.

    qkv [rows, heads + 2 * kv_heads, dim], or [rows, heads, dim] where keys and values are there already; cos, sin
    [rows, dim] as `Rotary` gives them; q_weight, k_weight [dim], or [0] where heads have no norm; keys, values
    [kv_heads, pool tokens, dim]; tables [lengths, blocks]; lengths: the position of each new token; window: how many
    tokens a row sees, 0 for all; out [rows, heads, dim], rows past the lengths are padding and become zero.
    """
    kv_heads, _, dim = keys.shape
    heads = out.shape[1]
    group = heads // kv_heads
    stores = qkv.shape[1] > heads
    scale = np.float32(1.0 / math.sqrt(dim))
    query = np.empty((heads, dim), np.float32)
    turned = np.empty(dim, np.float32)
    scores = np.empty((group, lengths.max() + 1), np.float32)
    out[len(lengths) :] = np.float32(0)
    for row in range(len(lengths)):
        length = lengths[row]
        first_token = max(length + 1 - window, 0) if window else 0
        token = tables[row, length // block_tokens] * block_tokens + length % block_tokens
        for head in range(heads):
            _turn(qkv[row, head], cos[row], sin[row], q_weight, np.float32(eps), turned)
            for i in range(dim):
                query[head, i] = turned[i] * scale
        if stores:
            for head in range(kv_heads):
                _turn(qkv[row, heads + head], cos[row], sin[row], k_weight, np.float32(eps), keys[head, token])
                values[head, token, :] = qkv[row, heads + kv_heads + head, :]
        for kv_head in range(kv_heads):
            first = kv_head * group
            last = first + group
            _score(query[first:last], keys[kv_head], tables[row], first_token, length, block_tokens, scores)
            for member in range(group):
                _softmax(scores[member], length + 1 - first_token)
            _mix(scores, values[kv_head], tables[row], first_token, length, block_tokens, out[row, first:last])


@_kernel
def store_rows(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    q_weight: Floats,
    k_weight: Floats,
    eps: float,
    keys: Floats,
    values: Floats,
    tokens: Ints,
    queries: Floats,
) -> None:
    """The part of a prefill layer before attention: norm and turn q and k, store k and v of the real rows.

    Shapes as in `attend_rows`; tokens: the pool token of each real row, rows past them are padding, and all are where
    keys and values are there already; queries [heads, rows, dim] takes the turned queries of all rows.
    """
    heads, rows, _ = queries.shape
    kv_heads = keys.shape[0]
    for row in range(rows):
        for head in range(heads):
            _turn(qkv[row, head], cos[row], sin[row], q_weight, np.float32(eps), queries[head, row])
    for row in range(len(tokens)):
        token = tokens[row]
        for head in range(kv_heads):
            _turn(qkv[row, heads + head], cos[row], sin[row], k_weight, np.float32(eps), keys[head, token])
            values[head, token, :] = qkv[row, heads + kv_heads + head, :]


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


@_inlined
def _norm(x: Floats, weight: Floats, eps: np.float32, size: np.float32, out: Floats) -> None:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / size + eps)
    for i in range(len(x)):
        out[i] = x[i] * factor * weight[i]


@_kernel
def _turn(x: Floats, cos: Floats, sin: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Rotate one head vector, after its norm where it has one."""
    dim = len(x)
    half = dim // 2
    if len(weight):
        normed = np.empty(dim, np.float32)
        _norm(x, weight, eps, np.float32(dim), normed)
        x = normed
    for i in range(half):
        out[i] = x[i] * cos[i] + x[half + i] * sin[i]
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i]


@_kernel
def _score(
    query: Floats, keys: Floats, table: Ints, first: int, length: int, block_tokens: int, scores: Floats
) -> None:
    """scores[member, t - first] = query[member] . key of token t, for t from `first` up to and with `length`."""
    group, dim = query.shape
    for block in range(first // block_tokens, length // block_tokens + 1):
        start = block * block_tokens
        base = table[block] * block_tokens
        for t in range(max(first - start, 0), min(block_tokens, length + 1 - start)):
            key = keys[base + t]
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
    weights: Floats, values: Floats, table: Ints, first: int, length: int, block_tokens: int, out: Floats
) -> None:
    """out[member] = sum over t of weights[member, t - first] * value of token t."""
    group, dim = out.shape
    out[:] = np.float32(0)
    for block in range(first // block_tokens, length // block_tokens + 1):
        start = block * block_tokens
        base = table[block] * block_tokens
        for t in range(max(first - start, 0), min(block_tokens, length + 1 - start)):
            value = values[base + t]
            for member in range(group):
                weight = weights[member, start + t - first]
                for i in range(dim):
                    out[member, i] += weight * value[i]
