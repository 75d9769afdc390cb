"""The head on a CPU: the model's matrix as it is, one logit a sum of its own.

The library's product gives its results in the type of its inputs: bfloat16 logits of 25 come in steps of an eighth,
and then the greatest of 49,152 is often one of two equals. Its float32 product wants the matrix repacked, a second
copy, and reads that at two thirds of the memory's speed. Each logit here is made in one fixed order, so its bits do
not depend on how many rows are asked for.
"""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor

from worker.cpu_kernels import Floats, PoolRows, as_array
from worker.cpu_threads import in_parts
from worker.vector_ops import HAS_PAIRS, HAS_WIDE, PAIR_DIMENSIONS, SCORED_KEYS, score_float_row, score_row


class RowHead:
    """`x @ weight.T` for rows x [rows, hidden]; weight [vocab, hidden], not copied. Results are float32."""

    def __init__(self, weight: Tensor) -> None:
        """The weight must satisfy `takes`."""
        self.weight = as_array(weight)
        self._dtype = weight.dtype

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether there is a kernel for a weight here."""
        rows, columns = weight.shape
        known = (HAS_PAIRS and weight.dtype == torch.bfloat16) or (HAS_WIDE and weight.dtype == torch.float32)
        shape = columns % PAIR_DIMENSIONS == 0 and rows >= SCORED_KEYS
        return known and shape and weight.device.type == "cpu" and weight.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], len(self.weight))
        rows, logits = as_array(x.to(self._dtype).contiguous()), out.numpy()
        in_parts(torch.get_num_threads(), lambda part, parts: head_rows(rows, self.weight, part, parts, logits))
        return out


@njit(nogil=True, cache=True)
def head_rows(x: PoolRows, weight: PoolRows, part: int, parts: int, out: Floats) -> None:
    """This part of the logits of all rows, 16 of the vocabulary at a time; the last ones may come twice."""
    vocab, hidden = weight.shape
    tiles = -(-vocab // SCORED_KEYS)
    for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
        first = min(tile * SCORED_KEYS, vocab - SCORED_KEYS)
        at = weight[first:].ctypes.data
        for row in range(len(x)):
            if weight.itemsize == 2:
                score_row(x[row].ctypes.data, at, hidden, out[row, first:].ctypes.data)
            else:
                score_float_row(x[row].ctypes.data, at, hidden, out[row, first:].ctypes.data)
