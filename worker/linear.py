"""Weight matrices in the layout that is fastest where the model runs.

On a CPU with oneDNN the weights are repacked once: measured on 2 cores of an AVX-512 machine (torch 2.13, float32,
30 layers of 576/1536), plain `F.linear` took 49 ms for 8 rows and 133 ms for 64, repacked weights 25 and 75 ms, and
a row's bits were the same for every row count from 2 to 1024, which plain products do not give.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout oneDNN picks depends on the row count it is told; one that suits decode and prefill alike.
_PACK_ROWS = 64


class Linear:
    """`y = x @ weight.T + bias` for x [rows, in_features] in the compute dtype; weight [out_features, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        weight = weight.to(device=device, dtype=dtype)
        self.bias = None if bias is None else bias.to(device=device, dtype=dtype)
        self.weight_bytes = weight.numel() * weight.element_size()
        self._packed = device.type == "cpu" and torch._C._has_mkldnn
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        inputs = x.to(self.dtype)
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self.bias, "none", [], "")
        else:
            y = F.linear(inputs, self._weight, self.bias)
        return y.to(x.dtype)
