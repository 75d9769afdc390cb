"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.cpu_kernels import as_array, rms_norm_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`x / rms(x) * weight` over the last dimension of x [..., size], computed in float32; in x's type or `dtype`."""
    dtype = dtype or x.dtype
    if x.device.type == "cpu" and x.dtype == torch.float32:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, dtype=dtype)
        rms_norm_rows(rows.numpy(), weight.numpy(), eps, as_array(out))
        return out if x.dim() == 2 else out.view(x.shape)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(dtype)
