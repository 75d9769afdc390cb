"""The gated delta rule (Yang et al., 2024) after a causal convolution, token by token, in plain torch.

This is what the kernels of `delta_kernels.py` must compute, and what runs where there is no kernel. Every row goes
through the same operations on tensors of the same shapes whatever rows come with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.model_shape import DeltaLayer

NORM_EPS = 1e-6  # in the norm of queries and keys


class DeltaWeights(NamedTuple):
    """What a layer knows of its recurrence, in float32."""

    conv: Tensor  # [taps, channels], the row's own input last
    decay: Tensor  # [v_heads]: a token multiplies the state by exp(decay * softplus(gate + bias)), decay < 0
    bias: Tensor  # [v_heads]


def delta_row(
    inputs: Tensor, gates: Tensor, weights: DeltaWeights, shape: DeltaLayer, tail: Tensor, state: Tensor
) -> Tensor:
    """Output [v_heads, v_dim] of one token; moves `tail` and `state` on by it.

    inputs [channels]; gates [2 * v_heads]; tail [taps - 1, channels]: the convolution's last inputs, newest last;
    state [v_heads, k_dim, v_dim].
    """
    window = torch.cat((tail, inputs[None]))
    tail.copy_(window[1:])
    mixed = F.silu((window * weights.conv).sum(0))
    keys = shape.k_heads * shape.k_dim
    q, k, v = mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]
    group = shape.v_heads // shape.k_heads
    q = _unit(q.view(shape.k_heads, shape.k_dim)).repeat_interleave(group, 0) * shape.k_dim**-0.5
    k = _unit(k.view(shape.k_heads, shape.k_dim)).repeat_interleave(group, 0)
    slow, beta = gates[: shape.v_heads], torch.sigmoid(gates[shape.v_heads :])
    decay = torch.exp(weights.decay * F.softplus(slow + weights.bias))

    state.mul_(decay[:, None, None])
    predicted = (k[:, :, None] * state).sum(1)
    change = (v.view(shape.v_heads, shape.v_dim) - predicted) * beta[:, None]
    state.add_(k[:, :, None] * change[:, None, :])
    out: Tensor = (q[:, :, None] * state).sum(1)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
