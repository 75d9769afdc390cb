"""From one joined projection to the queries, keys and values that attention takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from worker.norm import rms_norm
from worker.rope import rotate


class HeadNorms(NamedTuple):
    """Weights [head_dim] of the norms over each query and key head (Qwen3)."""

    q: Tensor
    k: Tensor
    eps: float


def split_heads(
    qkv: Tensor, kv_heads: int, norms: HeadNorms | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, heads, dim], k and v [rows, kv_heads, dim] of qkv [rows, heads + 2 * kv_heads, dim].

    Queries and keys come normed and turned by cos and sin [rows, dim].
    """
    heads = qkv.shape[1] - 2 * kv_heads
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    v = qkv[:, heads + kv_heads :]
    if norms is not None:
        q = rotate(rms_norm(qkv[:, :heads], norms.q, norms.eps), cos, sin)
        return q, rotate(rms_norm(qkv[:, heads : heads + kv_heads], norms.k, norms.eps), cos, sin), v
    turned = rotate(qkv[:, : heads + kv_heads], cos, sin)
    return turned[:, :heads], turned[:, heads:], v


def turned_queries(q: Tensor, norms: HeadNorms | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries [rows, heads, dim] of a layer that has nothing but queries, normed and turned."""
    if norms is not None:
        q = rms_norm(q, norms.q, norms.eps)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))
