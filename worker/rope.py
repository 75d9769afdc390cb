"""Rotary position embeddings (Su et al., 2021) in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model_config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair, float32 [head_dim / 2], after the scaling the configuration asks for."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
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
    """Cosines and sines of every position up to a length, float32 [positions, head_dim / 2]."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [rows, 1, head_dim / 2], of int64 positions [rows]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [rows, heads, head_dim] by the angles of its rows."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
