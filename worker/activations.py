"""Activations and gates of rows, with bits that do not depend on how many rows there are.

torch's own take another path in vector tails and where threads split, so on a CPU each row goes through a loop of
ours. They run on the calling thread alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from worker.cpu_kernels import Floats

_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
_inlined = njit(inline="always")

_ONE = np.float32(1)
# gelu(x) = x * sigmoid(x * (a + b * x ** 2)), its hyperbolic tangent written as a sigmoid
_GELU_A = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_B = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)


def gelu_times(x: Tensor, y: Tensor) -> Tensor:
    """`gelu(x) * y` in the tanh form of gelu, for rows [rows, size]."""
    if not _on_cpu(x):
        return F.gelu(x, approximate="tanh") * y
    out = torch.empty_like(x)
    _gelu_times(x.numpy(), y.numpy(), out.numpy())
    return out


def sigmoid_times(gate: Tensor, x: Tensor) -> Tensor:
    """`sigmoid(gate) * x` for rows [rows, size]."""
    if not _on_cpu(x):
        return torch.sigmoid(gate) * x
    out = torch.empty_like(x)
    _sigmoid_times(gate.numpy(), x.numpy(), out.numpy())
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x, weight) * silu(gate)` over each piece of `len(weight)` in rows x and gate [rows, size]."""
    if not _on_cpu(x):
        wide = x.float().view(len(x), -1, len(weight))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        gated: Tensor = (wide * scale * weight).flatten(1) * F.silu(gate.float())
        return gated.to(x.dtype)
    out = torch.empty_like(x)
    _gated_norm(x.numpy(), gate.numpy(), weight.numpy(), eps, out.numpy())
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` for float32 rows [rows, size]."""
    if not _on_cpu(x):
        return torch.tanh(x / cap) * cap
    out = torch.empty_like(x)
    _soft_cap(x.numpy(), np.float32(cap), out.numpy())
    return out


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


@_inlined
def _sigmoid(x: np.float32) -> np.float32:
    return np.float32(_ONE / (_ONE + np.float32(math.exp(-x))))


@_kernel
def _gelu_times(x: Floats, y: Floats, out: Floats) -> None:
    rows, size = x.shape
    for row in range(rows):
        for i in range(size):
            value = x[row, i]
            out[row, i] = value * _sigmoid(value * (_GELU_A + _GELU_B * value * value)) * y[row, i]


@_kernel
def _sigmoid_times(gate: Floats, x: Floats, out: Floats) -> None:
    rows, size = x.shape
    for row in range(rows):
        for i in range(size):
            out[row, i] = _sigmoid(gate[row, i]) * x[row, i]


@_kernel
def _gated_norm(x: Floats, gate: Floats, weight: Floats, eps: float, out: Floats) -> None:
    rows, size = x.shape
    dim = len(weight)
    for row in range(rows):
        for first in range(0, size, dim):
            total = np.float32(0)
            for i in range(dim):
                total += x[row, first + i] * x[row, first + i]
            factor = _ONE / np.sqrt(total / np.float32(dim) + np.float32(eps))
            for i in range(dim):
                value = gate[row, first + i]
                out[row, first + i] = x[row, first + i] * factor * weight[i] * value * _sigmoid(value)


@_kernel
def _soft_cap(x: Floats, cap: np.float32, out: Floats) -> None:
    rows, size = x.shape
    for row in range(rows):
        for i in range(size):
            out[row, i] = cap * np.float32(math.tanh(x[row, i] / cap))
