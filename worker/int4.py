"""Weights packed to 4 bits in groups of 32, for decode on a CPU; the same values in a wider type for prefill.

A decode step reads every weight once, so its time is their bytes: measured on 2 cores, the products of one step of
the embedded model took 26 ms in float32, 13 ms in bfloat16, 5 ms packed as torch does and 2 ms in tiles of our own.
Where arithmetic counts, in prefill, a wider layout of the same values runs. Both layouts are held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.linear import Linear
from worker.vector_ops import GROUP, TILE

PACKED_ROWS = 16  # the most rows that the packed product is used for
_LEVELS = 15


def can_pack(weight: Tensor) -> bool:
    """Whether torch's packed product takes this shape."""
    rows, columns = weight.shape
    return rows % TILE == 0 and columns % GROUP == 0


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels int32 [out, in], scales and zeros bfloat16 [in / 32, out, 2], and the values these stand for.

    A group's value is (level - 8) * scale + zero, its range being that of its weights: what Q4_1 of GGUF does, whose
    groups keep their values but for the rounding of scale and zero to bfloat16.
    """
    out_features, in_features = weight.shape
    groups = weight.float().view(out_features, in_features // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    wide_scale, wide_zero = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
    levels = ((groups - wide_zero) / wide_scale + 8).round_().clamp_(0, _LEVELS)
    values = ((levels - 8) * wide_scale + wide_zero).view(out_features, in_features)
    scales_and_zeros = torch.stack((scale.t(), zero.t()), dim=-1).contiguous()
    return levels.view(out_features, in_features).to(torch.int32), scales_and_zeros, values


class Tiles(NamedTuple):
    """A packed matrix as the vector products take it: TILE outputs and GROUP inputs at a time."""

    levels: NDArray[np.uint8]
    """[tiles, groups, bytes]: of four inputs after another, two bytes of each output. The first byte holds the first
    input below and the third above, the second byte the second and the fourth."""
    scales: NDArray[np.uint16]
    """bfloat16 [tiles, groups, 2, TILE]: scales, then zeros."""


def tiled(levels: Tensor, scales_and_zeros: Tensor) -> Tiles:
    """What `quantize` gives, in tiles."""
    outputs, inputs = levels.shape
    parts = levels.to(torch.uint8).view(outputs // TILE, TILE, inputs // GROUP, GROUP // 4, 2, 2)
    both = parts[..., 0, :] | (parts[..., 1, :] << 4)  # [tiles, outputs, groups, fours, 2]
    bytes_ = both.permute(0, 2, 3, 1, 4).reshape(outputs // TILE, inputs // GROUP, -1).contiguous()
    scales = scales_and_zeros.view(inputs // GROUP, outputs // TILE, TILE, 2).permute(1, 0, 3, 2).contiguous()
    return Tiles(bytes_.numpy(), scales.view(torch.uint16).numpy())


class Int4Linear(Linear):
    """A `Linear` that holds its weight packed as well. The weight's shape must satisfy `can_pack`.

    With `in_tiles` the packed form is `tiles`, for a step that runs whole layers (`packed_step.py`), and calls run
    the wide one. Without, calls with up to `PACKED_ROWS` rows run torch's packed product.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device, *, in_tiles: bool
    ) -> None:
        levels, scales, values = quantize(weight)
        super().__init__(values, bias, dtype, device)
        self.weight_bytes += scales.numel() * 2 + levels.numel() // 2
        self.tiles: Tiles | None = None
        if in_tiles:
            self.tiles = tiled(levels, scales)
        else:
            self._scales = scales
            self._levels = torch._convert_weight_to_int4pack_for_cpu(levels, 2)

    def _unary(self, x: Tensor, then: str) -> Tensor:
        if self.tiles is not None or x.shape[0] > PACKED_ROWS:
            return super()._unary(x, then)
        y = torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self._levels, GROUP, self._scales).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return torch.nn.functional.silu(y) if then == "swish" else y
