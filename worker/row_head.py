"""The head on a CPU: one logit a sum of its own, in float32, for any number of rows.

The library's product gives its results in the type of its inputs: bfloat16 logits of 25 come in steps of an eighth,
and then the greatest of 49,152 is often one of two equals. Its float32 product wants the matrix repacked, a second
copy, and reads that at two thirds of the memory's speed. Each logit here is made in one fixed order, so its bits do
not depend on how many rows are asked for.

The matrix is the model's own as it is, or its values in 8 bits where not one changes by that: a step then reads half
or a quarter of the bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from worker.cpu_kernels import Floats, PoolRows, as_array, put_row
from worker.cpu_threads import in_parts
from worker.product_ops import GROUP, TILE, exact_8
from worker.vector_ops import PAIR_DIMENSIONS, SCORED_KEYS, score_float_row, score_row
from worker.vectors import HAS_PAIRS, HAS_WIDE

_MOST_LEVEL = 127
_ROWS = 8  # the most rows that one tile is multiplied with at a time
_TILES_AT_A_TIME = 64


class ByteTiles(NamedTuple):
    """A matrix in 8 bits and groups of 32 inputs, level * scale a weight: Q8_0 as GGUF has it."""

    levels: NDArray[np.int8]
    """[tiles, groups, GROUP, TILE]"""
    scales: NDArray[np.uint16]
    """float16 [tiles, groups, TILE]"""
    outputs: int
    """Where it is no multiple of TILE, the last tile begins within the one before."""


Head = PoolRows | ByteTiles


def byte_tiles(weight: Tensor) -> ByteTiles | None:
    """The same values in 8 bits; None where that would change one. weight: floats [outputs, inputs].

    Done some rows at a time: a whole vocabulary in float32, three times over, may be more than all that is loaded.
    """
    outputs, inputs = weight.shape
    firsts = torch.arange(0, outputs, TILE).clamp_(max=outputs - TILE)
    levels = torch.empty(len(firsts), inputs // GROUP, GROUP, TILE, dtype=torch.int8)
    scales = torch.empty(len(firsts), inputs // GROUP, TILE, dtype=torch.float16)
    for at in range(0, len(firsts), _TILES_AT_A_TIME):
        part = slice(at, at + _TILES_AT_A_TIME)
        rows = (firsts[part].unsqueeze(-1) + torch.arange(TILE)).flatten()
        packed = _in_8_bits(weight[rows].float().view(-1, inputs // GROUP, GROUP))
        if packed is None:
            return None
        levels[part] = packed[0].view(-1, TILE, inputs // GROUP, GROUP).permute(0, 2, 3, 1)
        scales[part] = packed[1].view(-1, TILE, inputs // GROUP).transpose(1, 2)
    return ByteTiles(levels.numpy(), scales.view(torch.uint16).numpy(), outputs)


def _in_8_bits(groups: Tensor) -> tuple[Tensor, Tensor] | None:
    """Levels, and the scale of each group, of float32 [rows, groups, GROUP]; None where a value would change."""
    scales = (groups.abs().amax(-1) / _MOST_LEVEL).half()
    wide = scales.float().unsqueeze(-1)
    levels = (groups / wide.where(wide > 0, 1.0)).round_()
    return (levels.to(torch.int8), scales) if torch.equal(levels * wide, groups) else None


class RowHead:
    """`x @ weight.T` for rows x [rows, hidden]. Results are float32."""

    def __init__(self, weight: Tensor, kept: Tensor) -> None:
        """`weight` [vocab, hidden] as it was read; `kept` is the same in the type of the model and satisfies `takes`.

        What is held is `kept`, not copied, or the tiles that stand for `weight`.
        """
        tiles = byte_tiles(weight) if HAS_WIDE else None
        self.weight: Head = as_array(kept) if tiles is None else tiles
        self.own_bytes = 0 if tiles is None else tiles.levels.nbytes + tiles.scales.nbytes
        self._vocab = len(kept)

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether there is a kernel for a weight here."""
        rows, columns = weight.shape
        known = (HAS_PAIRS and weight.dtype == torch.bfloat16) or (HAS_WIDE and weight.dtype == torch.float32)
        shape = columns % PAIR_DIMENSIONS == 0 and rows >= SCORED_KEYS
        return known and shape and weight.device.type == "cpu" and weight.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], self._vocab)
        rows, logits = x.float().contiguous().numpy(), out.numpy()
        in_parts(torch.get_num_threads(), lambda part, parts: head_rows(rows, self.weight, part, parts, logits))
        return out


def _head(x: Any, weight: Any, part: Any, parts: Any, out: Any) -> None:
    raise NotImplementedError("for compiled code only")


@overload(_head)
def _head_of(x: Any, weight: Any, part: Any, parts: Any, out: Any) -> Any:
    def tiles(x: Any, weight: Any, part: Any, parts: Any, out: Any) -> None:
        count, groups = weight.scales.shape[:2]
        tile = np.empty((_ROWS, TILE), np.float32)
        for index in range(count * part // parts, count * (part + 1) // parts):
            at = min(index * TILE, weight.outputs - TILE)
            levels, scales = weight.levels[index].ctypes.data, weight.scales[index].ctypes.data
            first = 0
            while first < len(x):
                rows = exact_8(levels, scales, groups, x, first, tile.ctypes.data)
                for r in range(rows):
                    out[first + r, at : at + TILE] = tile[r]
                first += rows

    def floats(x: Any, weight: Any, part: Any, parts: Any, out: Any) -> None:
        vocab, hidden = weight.shape
        count = -(-vocab // SCORED_KEYS)
        for index in range(count * part // parts, count * (part + 1) // parts):
            at = min(index * SCORED_KEYS, vocab - SCORED_KEYS)
            for row in range(len(x)):
                score_float_row(x[row].ctypes.data, weight[at:].ctypes.data, hidden, out[row, at:].ctypes.data)

    def halves(x: Any, weight: Any, part: Any, parts: Any, out: Any) -> None:
        vocab, hidden = weight.shape
        given = np.empty((len(x), hidden), weight.dtype)
        for row in range(len(x)):
            put_row(x[row], given[row])
        count = -(-vocab // SCORED_KEYS)
        for index in range(count * part // parts, count * (part + 1) // parts):
            at = min(index * SCORED_KEYS, vocab - SCORED_KEYS)
            for row in range(len(x)):
                score_row(given[row].ctypes.data, weight[at:].ctypes.data, hidden, out[row, at:].ctypes.data)

    if isinstance(weight, types.BaseNamedTuple):
        return tiles
    return halves if weight.dtype is types.uint16 else floats


@njit(nogil=True, cache=True)
def head_rows(x: Floats, weight: Head, part: int, parts: int, out: Floats) -> None:
    """This part of the logits of all rows, 16 of the vocabulary at a time; the last ones may come twice."""
    _head(x, weight, part, parts, out)
