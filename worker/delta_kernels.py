"""The recurrence of `delta_rule.py` for float32 rows on a CPU, compiled by Numba.

Each row is one step in one fixed order, so neither where a prompt is cut nor what else is decoded can show in a bit
of output or state. It runs on the calling thread alone.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from worker.cpu_kernels import Floats, Ints
from worker.delta_rule import NORM_EPS

# Sums may be reordered by the compiler to use vector registers: once, at compile time, the same for every row.
_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")

_EPS = np.float32(NORM_EPS)
_ONE = np.float32(1)
_LINEAR_FROM = np.float32(20)  # softplus is its argument from here on, to float32


@_kernel
def delta_rows(
    inputs: Floats,
    gates: Floats,
    conv: Floats,
    decay: Floats,
    bias: Floats,
    memory: Floats,
    entries: Ints,
    start: int,
    k_heads: int,
    k_dim: int,
    out: Floats,
) -> None:
    """Row after row continues from its entry of `memory` and leaves its own state there.

    inputs [rows, channels], gates [rows, 2 * v_heads], conv [taps, channels], decay and bias [v_heads]; memory
    [entries, floats], where this layer's part of an entry begins at `start`: the convolution's last inputs
    [taps - 1, channels], then the state [v_heads, k_dim, v_dim]; entries: that of each real row, later rows are
    padding; out [rows, v_heads, v_dim], of padding it becomes zero.
    """
    rows = len(entries)
    taps, channels = conv.shape
    _, v_heads, v_dim = out.shape
    group = v_heads // k_heads
    tail_end = start + (taps - 1) * channels
    keys_at, values_at = k_heads * k_dim, 2 * k_heads * k_dim
    scale = np.float32(1.0 / math.sqrt(k_dim))
    mixed = np.empty((rows, channels), np.float32)
    change = np.empty(v_dim, np.float32)
    out[rows:] = np.float32(0)
    for row in range(rows):
        tail = memory[entries[row]][start:tail_end].reshape((taps - 1, channels))
        _convolve(inputs[row], tail, conv, mixed[row])
        for head in range(k_heads):
            first = head * k_dim
            _to_length(mixed[row, first : first + k_dim], scale)
            _to_length(mixed[row, keys_at + first : keys_at + first + k_dim], _ONE)
    for head in range(v_heads):
        state_at = tail_end + head * k_dim * v_dim
        key_head = head // group * k_dim
        for row in range(rows):
            state = memory[entries[row]][state_at : state_at + k_dim * v_dim].reshape((k_dim, v_dim))
            value_at = values_at + head * v_dim
            _step(
                mixed[row, key_head : key_head + k_dim],
                mixed[row, keys_at + key_head : keys_at + key_head + k_dim],
                mixed[row, value_at : value_at + v_dim],
                np.float32(math.exp(decay[head] * _softplus(gates[row, head] + bias[head]))),
                _sigmoid(gates[row, v_heads + head]),
                state,
                change,
                out[row, head],
            )


@_kernel
def _convolve(inputs: Floats, tail: Floats, conv: Floats, out: Floats) -> None:
    """out = silu of the convolution at this row, oldest input first; the row becomes the newest of `tail`."""
    before = len(tail)
    for i in range(len(inputs)):
        total = np.float32(0)
        for tap in range(before):
            total += conv[tap, i] * tail[tap, i]
        total += conv[before, i] * inputs[i]
        out[i] = total * _sigmoid(total)
    for tap in range(before - 1):
        tail[tap, :] = tail[tap + 1, :]
    tail[before - 1, :] = inputs


@_kernel
def _to_length(x: Floats, length: np.float32) -> None:
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = length / np.sqrt(total + _EPS)
    for i in range(len(x)):
        x[i] *= factor


@_kernel
def _step(
    q: Floats,
    k: Floats,
    v: Floats,
    decay: np.float32,
    beta: np.float32,
    state: Floats,
    change: Floats,
    out: Floats,
) -> None:
    """One token of one head; the loops run along the values, so every sum is over keys in their order."""
    k_dim, v_dim = state.shape
    change[:] = np.float32(0)
    for i in range(k_dim):
        key = k[i]
        for j in range(v_dim):
            kept = state[i, j] * decay
            state[i, j] = kept
            change[j] += key * kept
    for j in range(v_dim):
        change[j] = (v[j] - change[j]) * beta
    out[:] = np.float32(0)
    for i in range(k_dim):
        key, query = k[i], q[i]
        for j in range(v_dim):
            new = state[i, j] + key * change[j]
            state[i, j] = new
            out[j] += query * new


@_inlined
def _sigmoid(x: np.float32) -> np.float32:
    return np.float32(_ONE / (_ONE + np.float32(math.exp(-x))))


@_inlined
def _softplus(x: np.float32) -> np.float32:
    return x if x > _LINEAR_FROM else np.float32(math.log1p(math.exp(x)))
