"""A float32 matrix held a second time, as the vector products of a decode step read it.

The library's repacked layout is its own secret, and its product at one row reads it at 24 GB/s where the memory of the
same two cores gives 35. Prefill wants that layout, so both are held where the model is small enough for that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.linear import Linear
from worker.vector_ops import TILE


class FloatTiles(NamedTuple):
    """A float32 matrix in tiles of TILE outputs."""

    values: NDArray[np.float32]
    """[tiles, inputs, TILE]"""


class TiledLinear(Linear):
    """A float32 `Linear` that holds `tiles` as well; its outputs must be a multiple of TILE."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        super().__init__(weight, bias, torch.float32, device)
        outputs, inputs = weight.shape
        values = weight.to(torch.float32).view(outputs // TILE, TILE, inputs).transpose(1, 2).contiguous()
        self.tiles = FloatTiles(values.numpy())
        self.weight_bytes += values.nbytes
