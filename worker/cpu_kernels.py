"""Kernels for rows on a CPU, compiled by Numba: what is too small for a library call to pay.

A decode step of a small model is hundreds of tiny operations, and dispatching each through torch cost a third of
the step (11 of 38 ms at one row of 30 layers, measured). Each kernel here works on one row at a time in one fixed
order, so a row's bits cannot depend on the rows beside it. They run on the calling thread alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Halves = NDArray[np.uint16]  # bfloat16, which NumPy does not know: the upper half of a float32
PoolRows = Floats | Halves

# Sums may be reordered by the compiler to use vector registers: once, at compile time, the same for every row.
_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")


def as_array(x: Tensor) -> PoolRows:
    """A CPU tensor of float32 or bfloat16 as NumPy sees it."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


@_kernel
def rms_norm_rows(x: Floats, weight: Floats, eps: float, out: PoolRows) -> None:
    """out[row] = x[row] / sqrt(mean(x[row] ** 2) + eps) * weight, for x and out [rows, size], out of either type."""
    size = np.float32(x.shape[1])
    normed = np.empty(x.shape[1], np.float32)
    for row in range(x.shape[0]):
        norm_row(x[row], weight, np.float32(eps), size, normed)
        put_row(normed, out[row])


@_kernel
def store_rows(
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
) -> None:
    """The part of a layer before attention: norm and turn q and k, store k and v of the real rows.

    qkv [rows, heads + 2 * kv_heads, dim], of either type as well, or [rows, heads, dim] where keys and values are
    there already; cos, sin [rows, dim] as `Rotary` gives them; q_weight, k_weight [dim], or [0] where heads have no
    norm; keys, values: the pool [kv_heads, tokens, dim], of float32 or of bfloat16 seen as uint16; tokens: the pool
    token of each real row, rows past them are padding, as all are where nothing is stored; queries [heads, rows, dim]
    takes the turned queries of all rows.
    """
    heads, rows, dim = queries.shape
    kv_heads = keys.shape[0]
    turned, widened = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for row in range(rows):
        for head in range(heads):
            x = float_row(qkv[row, head], widened)
            turn_head(x, cos[row], sin[row], q_weight, np.float32(eps), queries[head, row])
    for row in range(len(tokens)):
        token = tokens[row]
        for head in range(kv_heads):
            x = float_row(qkv[row, heads + head], widened)
            turn_head(x, cos[row], sin[row], k_weight, np.float32(eps), turned)
            put_row(turned, keys[head, token])
            put_row(float_row(qkv[row, heads + kv_heads + head], widened), values[head, token])


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


def float_row(row: Any, widened: Any) -> Any:
    """A row in float32: itself, or in `widened` where it is of bfloat16."""
    raise NotImplementedError("for compiled code only")


@overload(float_row)
def _float_row_of(row: Any, widened: Any) -> Any:
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
