"""The head in bfloat16 with logits in float32.

The library's product gives its results in the type of its inputs: logits of 25 come in steps of an eighth, and then
the greatest of 49,152 is often one of two equals. These are the sums as they are. Each logit is a sum of its own in one
fixed order, so its bits do not depend on how many rows are asked for.
"""

from __future__ import annotations

import torch
from numba import njit
from torch import Tensor

from worker.cpu_kernels import Floats, Halves
from worker.cpu_threads import in_parts
from worker.vector_ops import HAS_PAIRS, PAIR_DIMENSIONS, SCORED_KEYS, score_row


class PairHead:
    """`x @ weight.T` for rows x [rows, hidden]; weight bfloat16 [vocab, hidden], not copied. Results are float32."""

    def __init__(self, weight: Tensor) -> None:
        """The weight must satisfy `takes`."""
        self.weight: Halves = weight.view(torch.uint16).numpy()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether there is a kernel for a weight here."""
        rows, columns = weight.shape
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return HAS_PAIRS and on_cpu and columns % PAIR_DIMENSIONS == 0 and rows >= SCORED_KEYS

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], len(self.weight))
        rows, logits = x.bfloat16().contiguous().view(torch.uint16).numpy(), out.numpy()
        in_parts(torch.get_num_threads(), lambda part, parts: head_rows(rows, self.weight, part, parts, logits))
        return out


@njit(nogil=True, cache=True)
def head_rows(x: Halves, weight: Halves, part: int, parts: int, out: Floats) -> None:
    """This part of the logits of all rows, 16 of the vocabulary at a time; the last ones may come twice."""
    vocab, hidden = weight.shape
    tiles = -(-vocab // SCORED_KEYS)
    for tile in range(tiles * part // parts, tiles * (part + 1) // parts):
        first = min(tile * SCORED_KEYS, vocab - SCORED_KEYS)
        at = weight[first:].ctypes.data
        for row in range(len(x)):
            score_row(x[row].ctypes.data, at, hidden, out[row, first:].ctypes.data)
