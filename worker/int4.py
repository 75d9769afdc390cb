"""Weights packed to 4 bits in groups of 32, for decode on a CPU; the same values in a wider type for prefill.

A decode step reads every weight once, so its time is their bytes: measured on 2 cores, the products of one step of
the embedded model took 26 ms in float32, 13 ms in bfloat16 and 5 ms packed. Packed products lose from some 16 rows
on, where arithmetic counts: there a wider layout of the same values runs. Both layouts are held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.linear import Linear

GROUP = 32  # weights of one row that share a scale and a zero point
PACKED_ROWS = 16  # the most rows that the packed product is used for
_LEVELS = 15


def can_pack(weight: Tensor) -> bool:
    """Whether torch's packed product takes this shape."""
    rows, columns = weight.shape
    return rows % 16 == 0 and columns % GROUP == 0


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


class Int4Linear(Linear):
    """A `Linear` that runs packed for up to `PACKED_ROWS` rows. The weight's shape must satisfy `can_pack`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        levels, self._scales, values = quantize(weight)
        super().__init__(values, bias, dtype, device)
        self._levels = torch._convert_weight_to_int4pack_for_cpu(levels, 2)
        self.weight_bytes += self._scales.numel() * 2 + levels.numel() // 2

    def _unary(self, x: Tensor, then: str) -> Tensor:
        if x.shape[0] > PACKED_ROWS:
            return super()._unary(x, then)
        y = torch._weight_int4pack_mm_for_cpu(x.bfloat16(), self._levels, GROUP, self._scales).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return torch.nn.functional.silu(y) if then == "swish" else y
