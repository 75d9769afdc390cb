"""Weight matrices in the layout that is fastest where the model runs.

On a CPU with oneDNN the weights are repacked once: measured on 2 cores of an AVX-512 machine (torch 2.13, float32,
30 layers of 576/1536), plain `F.linear` took 49 ms for 8 rows and 133 ms for 64, repacked weights 21 and 75 ms, and
a row's bits were the same for every row count from 2 to 1024, which plain products do not give. What follows a
product (an activation, a sum, a factor) is applied by the same kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout oneDNN picks depends on the row count it is told; this one suits decode and prefill alike.
_PACK_ROWS = 64


class Linear:
    """`x @ weight.T + bias` for rows x [rows, in_features]; weight [out_features, in_features].

    The product is computed in `dtype`; rows come and go in the type of x. With `repack` off the matrix stays as it
    is, wherever the model runs.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        repack: bool = True,
    ) -> None:
        self.dtype = dtype
        weight = weight.to(device=device, dtype=dtype)
        self.bias = None if bias is None else bias.to(device=device, dtype=dtype)
        self.weight_bytes = weight.numel() * weight.element_size()
        self._packed = repack and device.type == "cpu" and _packs(dtype)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    @property
    def weight(self) -> Tensor:
        """The matrix [out_features, in_features], where it was not repacked."""
        assert not self._packed
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """`silu(self(x))`."""
        return self._unary(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """`self(x) + other`, other [rows, out_features]."""
        return self._binary(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """`self(x) * other`, other [rows, out_features]."""
        return self._binary(x, other, "mul")

    def _unary(self, x: Tensor, then: str) -> Tensor:
        inputs = x.to(self.dtype)
        if self._packed:
            y: Tensor = _pointwise(inputs, self._weight, self.bias, then, [], "")
        else:
            y = F.linear(inputs, self._weight, self.bias)
            y = F.silu(y) if then == "swish" else y
        return y.to(x.dtype)

    def _binary(self, x: Tensor, other: Tensor, then: str) -> Tensor:
        if self._packed and x.dtype == other.dtype == self.dtype:
            y: Tensor = _pointwise_binary(x, other, self._weight, self.bias, then)
            return y
        y = self._unary(x, "none")
        return y + other if then == "add" else y * other


def _packs(dtype: torch.dtype) -> bool:
    """Whether the library has products of repacked weights for this processor: of bfloat16 not for every one."""
    if not torch._C._has_mkldnn:
        return False
    is_supported: bool = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_supported


if torch._C._has_mkldnn:
    _pointwise = torch.ops.mkldnn._linear_pointwise.default
    _pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary
