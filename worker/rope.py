"""Rotary position embeddings (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from worker.cpu_kernels import rotary_factors
from worker.model_shape import Rope

_PAGE = 256  # positions filled at once


def inverse_frequencies(rope: Rope) -> Tensor:
    """Angle per position of each pair, float32 [head_dim / 2], after the scaling the configuration asks for."""
    exponents = torch.arange(0, 2 * rope.pairs, 2, dtype=torch.int64).float() / rope.span
    frequencies = torch.zeros(rope.head_dim // 2)
    frequencies[: rope.pairs] = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
    # Llama 3: long wavelengths are divided by the factor, short ones kept, the band between is blended.
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, scaled)


class Rotary:
    """Factors of positions, float32 [positions, head_dim] each: a position's bits do not depend on those beside it.

    `cos` multiplies a vector, `sin` the vector with its halves exchanged: its first half carries the minus sign.
    A table of all positions takes half a gigabyte for heads of 512 and 131k positions. So on a CPU it is filled as far
    as positions are asked for, in pages that the system gives on first use; elsewhere factors are made for each pass.
    """

    def __init__(self, rope: Rope, max_positions: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._filled = 0
        size = (max_positions if device.type == "cpu" else 0, rope.head_dim)
        self._cos, self._sin = (torch.from_numpy(np.zeros(size, np.float32)) for _ in range(2))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [rows, head_dim], of int64 positions [rows]. Padding may lie past the last position."""
        if positions.device.type == "cpu":
            within = positions.clamp(max=len(self._cos) - 1)
            self._fill(int(within.max()) + 1)
            return self._cos[within], self._sin[within]
        angles = torch.outer(positions.float(), self._frequencies)
        turned = angles.sin()
        return angles.cos().repeat(1, 2), torch.cat((-turned, turned), dim=-1)

    def _fill(self, end: int) -> None:
        """Have the factors of positions [0, end)."""
        if end > self._filled:
            span = slice(self._filled, min(-(-end // _PAGE) * _PAGE, len(self._cos)))
            positions = np.arange(span.start, span.stop)
            rotary_factors(positions, self._frequencies.numpy(), self._cos[span].numpy(), self._sin[span].numpy())
            self._filled = span.stop


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [rows, heads, head_dim] by the angles of its rows."""
    half = x.shape[-1] // 2
    exchanged = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, exchanged, sin).to(x.dtype)
