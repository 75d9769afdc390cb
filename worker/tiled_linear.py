"""A float32 matrix held a second time, as the vector products of a decode step read it.

The library's repacked layout is its own secret, and its product at one row reads it at 24 GB/s where the memory of the
same two cores gives 35. Prefill wants that layout, so both are held where the model is small enough for that. Values
that came out of 4 bits go back into them where not one changes: the products are then of the same float32 numbers, to
the bit, and read a sixth of the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.int4 import Tiles, quantize, tiled
from worker.linear import Linear
from worker.product_ops import TILE


class FloatTiles(NamedTuple):
    """A float32 matrix in tiles of TILE outputs."""

    values: NDArray[np.float32]
    """[tiles, inputs, TILE]"""


def float_tiles(weight: Tensor) -> FloatTiles:
    """A float32 matrix [outputs, inputs] in tiles; its outputs must be a multiple of TILE."""
    outputs, inputs = weight.shape
    return FloatTiles(weight.view(outputs // TILE, TILE, inputs).transpose(1, 2).contiguous().numpy())


class TiledLinear(Linear):
    """A float32 `Linear` that holds `tiles` as well. The weight's shape must satisfy `int4.can_pack`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        super().__init__(weight, bias, torch.float32, device)
        weight = weight.to(torch.float32)
        quantized = quantize(weight, torch.float16)
        exact = torch.equal(quantized.values(), weight)
        self.tiles: Tiles | FloatTiles = tiled(quantized) if exact else float_tiles(weight)
        self.weight_bytes += sum(part.nbytes for part in self.tiles)
