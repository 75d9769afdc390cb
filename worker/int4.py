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
from worker.product_ops import GROUP, TILE

PACKED_ROWS = 16  # the most rows that the packed product is used for
_LEVELS = 15
_TORCH_MIDDLE = 8  # torch's product takes (level - 8) * scale + zero, both of bfloat16


def can_pack(weight: Tensor) -> bool:
    """Whether torch's packed product takes this shape."""
    rows, columns = weight.shape
    return rows % TILE == 0 and columns % GROUP == 0


class Quantized(NamedTuple):
    """A matrix [out, in] in groups of 32 inputs: a weight is level * scale + zero.

    Of Q4_1 as GGUF has it, groups keep their values where scales and zeros are float16, as they are there.
    """

    levels: Tensor  # int32 [out, in], 0 to 15
    scales: Tensor  # [out, in / 32]
    zeros: Tensor  # float32, the same shape; the least weight of each group

    def values(self) -> Tensor:
        """The weights that these stand for, float32 [out, in]."""
        outputs, inputs = self.levels.shape
        groups = self.levels.view(outputs, inputs // GROUP, GROUP)
        return (groups * self.scales.float().unsqueeze(-1) + self.zeros.unsqueeze(-1)).view(outputs, inputs)


def quantize(weight: Tensor, dtype: torch.dtype, middle: int = 0) -> Quantized:
    """A group's range is that of its weights; `dtype` is that of scales and of the value at level `middle`."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / _LEVELS).clamp_min(torch.finfo(dtype).tiny).to(dtype)
    wide = scales.float()
    zeros = (low + middle * wide).to(dtype).float() - middle * wide
    levels = ((groups - zeros.unsqueeze(-1)) / wide.unsqueeze(-1)).round_().clamp_(0, _LEVELS)
    return Quantized(levels.view(outputs, inputs).to(torch.int32), scales, zeros)


class Tiles(NamedTuple):
    """A packed matrix as the vector products take it: TILE outputs and GROUP inputs at a time."""

    levels: NDArray[np.uint8]
    """[tiles, groups, bytes]: of four inputs after another, two bytes of each output. The first byte holds the first
    input below and the third above, the second byte the second and the fourth."""
    scales: NDArray[np.uint16]
    """float16 [tiles, groups, 2, TILE]: scales, then zeros."""


def tiled(quantized: Quantized) -> Tiles:
    """The same in tiles; it must be of float16 and middle 0."""
    outputs, inputs = quantized.levels.shape
    parts = quantized.levels.to(torch.uint8).view(outputs // TILE, TILE, inputs // GROUP, GROUP // 4, 2, 2)
    both = parts[..., 0, :] | (parts[..., 1, :] << 4)  # [tiles, outputs, groups, fours, 2]
    bytes_ = both.permute(0, 2, 3, 1, 4).reshape(outputs // TILE, inputs // GROUP, -1).contiguous()
    factors = torch.stack((quantized.scales, quantized.zeros.half()))  # [2, outputs, groups]
    factors = factors.view(2, outputs // TILE, TILE, inputs // GROUP).permute(1, 3, 0, 2).contiguous()
    return Tiles(bytes_.numpy(), factors.view(torch.uint16).numpy())


def untiled(tiles: Tiles) -> Tensor:
    """The weights that tiles stand for, float32 [outputs, inputs]."""
    count, groups, _ = tiles.levels.shape
    both = torch.from_numpy(tiles.levels).view(count, groups, GROUP // 4, TILE, 2)
    parts = torch.stack((both & 15, both >> 4), dim=-2)  # [tiles, groups, fours, outputs, half, 2]
    levels = parts.permute(0, 3, 1, 2, 4, 5).reshape(count * TILE, groups * GROUP)
    factors = torch.from_numpy(tiles.scales).view(torch.float16).permute(2, 0, 3, 1)
    scales, zeros = factors.reshape(2, count * TILE, groups)
    return Quantized(levels.to(torch.int32), scales, zeros.float()).values()


class Int4Linear(Linear):
    """A `Linear` that holds its weight packed as well. The weight's shape must satisfy `can_pack`.

    With `in_tiles` the packed form is `tiles`, for a step that runs whole layers (`whole_step.py`), and calls run
    the wide one. Without, calls with up to `PACKED_ROWS` rows run torch's packed product.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device, *, in_tiles: bool
    ) -> None:
        quantized = (
            quantize(weight, torch.float16) if in_tiles else quantize(weight, torch.bfloat16, _TORCH_MIDDLE)
        )
        super().__init__(quantized.values(), bias, dtype, device)
        self.weight_bytes += 2 * 2 * quantized.scales.numel() + weight.numel() // 2
        self.tiles: Tiles | None = None
        if in_tiles:
            self.tiles = tiled(quantized)
        else:
            middle = (quantized.zeros + _TORCH_MIDDLE * quantized.scales.float()).bfloat16()
            self._scales = torch.stack((quantized.scales.t(), middle.t()), dim=-1).contiguous()
            self._levels = torch._convert_weight_to_int4pack_for_cpu(quantized.levels, 2)

    def _unary(self, x: Tensor, then: str) -> Tensor:
        if self.tiles is not None or x.shape[0] > PACKED_ROWS:
            return super()._unary(x, then)
        rows = x.bfloat16().contiguous()  # queries are a part of wider rows
        y = torch._weight_int4pack_mm_for_cpu(rows, self._levels, GROUP, self._scales).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return torch.nn.functional.silu(y) if then == "swish" else y
