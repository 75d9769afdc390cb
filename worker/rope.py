"""Rotary position embeddings (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model_shape import Rope


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


class RotaryTable:
    """Factors of every position up to a length, float32 [positions, head_dim] each.

    `cos` multiplies a vector, `sin` the vector with its halves exchanged: its first half carries the minus sign.
    """

    def __init__(self, rope: Rope, max_positions: int, device: torch.device) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope))
        sin = angles.sin()
        self.cos = angles.cos().repeat(1, 2).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [rows, head_dim], of int64 positions [rows]. Padding may lie past the table's end."""
        within = positions.clamp(max=len(self.cos) - 1)
        return self.cos[within], self.sin[within]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [rows, heads, head_dim] by the angles of its rows."""
    half = x.shape[-1] // 2
    exchanged = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, exchanged, sin).to(x.dtype)
