"""What the CUDA backend computes, and the plain torch form of it that any device can run.

`TorchOps` says what each operation means, runs where there is no Triton, and is what tests compare `TritonOps` with.
All rows are [rows, size] and contiguous. A layer's `pool` is [2, kv_heads, blocks, block_tokens, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.heads import HeadNorms
from worker.kv_cache import plain_copy

PaddedRows = Mapping[tuple[int, int, int], int]
"""The rows that products of (rows, outputs, inputs) are computed with, where those are not `rows`."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a pass stand.

    `positions` int32 [rows], -1 for padding. `tables` int32 [rows, blocks], or [1, blocks] where all
    rows are of one sequence; it is padded to whole tiles of keys. `cos` and `sin` float32 [rows, head_dim]. Rows of
    queries and projections past these are padding, whose results may be anything. `span` int32 [2], for prefill
    alone: the first position and how many rows are no padding, which come first.
    """

    positions: Tensor
    tables: Tensor
    cos: Tensor
    sin: Tensor
    span: Tensor


def last_rows(places: Places, count: int) -> tuple[Tensor, Places]:
    """The last `count` rows of a pass that has more: which ones they are, and their places once queries are turned.

    Of a pass that has none at all, as one has that is captured, some rows.
    """
    begin = (places.span[1:] - count).clamp(min=0)
    index = (begin + torch.arange(count, dtype=torch.int32, device=begin.device)).long()
    span = torch.cat((places.span[:1] + begin, torch.full_like(begin, count)))
    return index, replace(places, positions=places.positions[index], span=span)


def at_their_rows(few: Tensor, index: Tensor, count: int) -> Tensor:
    """`count` rows, of which those at `index` are `few` and the others anything."""
    return few.new_empty(count, few.shape[1]).index_copy_(0, index, few)


class Ops(Protocol):
    """The operations of a dense decoder."""

    padded: PaddedRows

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm(x) * weight`."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x += y` in place, then its norm."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of rows [gate | up]."""

    def gated_product(self, gate_up: Tensor, weight: Tensor) -> Tensor:
        """`product(gate(gate_up), weight)`."""

    def copy_block(self, memory: Tensor, source: int, target: int) -> None:
        """Copy a block of memory [layers, 2, kv_heads, blocks, block_tokens, head_dim] over all layers and heads."""

    def copy_named_block(self, memory: Tensor, pair: Tensor) -> None:
        """The same; `pair`, int32 [2], names them on the device."""

    def turn_and_store(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: HeadNorms | None,
        places: Places,
        pool: Tensor,
        *,
        stores: bool = True,
        norm_values: bool = False,
    ) -> Tensor:
        """Bias, norm and turn the heads of rows [q | k | v]; keys and values go to the pool. The queries' rows.

        With `stores` off a row is queries alone; `norm_values` brings values to unit mean square. Rows may be part of
        longer ones.
        """

    def attend_prefill(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        """Causal attention of rows of one sequence, keys stored already, none past `longest` tokens. Rows like q.

        A row sees the last `window` tokens, its own among them, or all.
        """

    def attend_decode(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        """Attention of one row a sequence, none longer than `longest` tokens. Rows like q; padding gives zeros."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T` for many rows."""

    def skinny(
        self, x: Tensor, weight: Tensor, plus: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """`x @ weight.T`, plus rows where given, for the few rows of a decode step; in `dtype`, else that of x."""

    def skinny_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        """`gate(x @ weight.T)`."""


class TorchOps:
    """`Ops` in torch alone, in float32 between roundings."""

    def __init__(self, padded: PaddedRows | None = None) -> None:
        self.padded: PaddedRows = padded or {}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        x += y
        return self.norm(x, weight, eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gated_product(self, gate_up: Tensor, weight: Tensor) -> Tensor:
        return self.product(self.gate(gate_up), weight)

    def copy_block(self, memory: Tensor, source: int, target: int) -> None:
        plain_copy(memory, source, target)

    def copy_named_block(self, memory: Tensor, pair: Tensor) -> None:
        plain_copy(memory, *pair.tolist())

    def turn_and_store(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: HeadNorms | None,
        places: Places,
        pool: Tensor,
        *,
        stores: bool = True,
        norm_values: bool = False,
    ) -> Tensor:
        kv_heads, block, dim = pool.shape[1] if stores else 0, pool.shape[3], pool.shape[4]
        rows = qkv[: len(places.positions)].float()
        parts = (rows if bias is None else rows + bias.float()).view(len(rows), -1, dim)
        heads = parts.shape[1] - 2 * kv_heads
        q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
        if norms is not None:
            v = self.norm(v, torch.ones_like(norms.q), norms.eps) if norm_values else v
            q, k = self.norm(q, norms.q, norms.eps), self.norm(k, norms.k, norms.eps) if stores else k
        q, k = _turned(q, places), _turned(k, places)
        real = (places.positions >= 0).nonzero().flatten()
        at = places.positions[real].long()
        blocks = places.tables.expand(len(rows), -1)[real, at // block].long()
        if stores:
            pool[0][:, blocks, at % block] = k[real].transpose(0, 1).to(pool.dtype)
            pool[1][:, blocks, at % block] = v[real].transpose(0, 1).to(pool.dtype)
        out = qkv.new_zeros(len(qkv), q.shape[1] * dim)
        out[: len(rows)] = q.flatten(1)
        return out

    def attend_prefill(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        out = torch.zeros_like(q)
        start, rows = places.span.tolist()
        for row in range(rows):
            out[row] = self._attend(q[row], places.tables[0], pool, start + row, window)
        return out

    def attend_decode(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        rows = zip(q, places.tables, places.positions.tolist(), strict=True)
        return torch.stack([self._attend(row, table, pool, position, window) for row, table, position in rows])

    def _attend(self, q: Tensor, table: Tensor, pool: Tensor, position: int, window: int | None) -> Tensor:
        """One row, over the keys up to `position` that its window holds."""
        if position < 0:
            return torch.zeros_like(q)
        kv_heads, block, dim = pool.shape[1], pool.shape[3], pool.shape[4]
        blocks = table[: position // block + 1].long()
        first = 0 if window is None else max(position + 1 - window, 0)
        keys, values = pool[:, :, blocks].flatten(2, 3)[:, :, first : position + 1].float()
        scores = q.float().view(kv_heads, -1, dim) @ keys.transpose(1, 2) / math.sqrt(dim)
        mixed: Tensor = scores.softmax(-1) @ values
        return mixed.flatten().to(q.dtype)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return padded_product(x, weight, self.padded)

    def skinny(
        self, x: Tensor, weight: Tensor, plus: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        out = F.linear(x.float(), weight.float())
        return (out if plus is None else out + plus.float()).to(dtype or x.dtype)

    def skinny_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gate(F.linear(x.float(), weight.float())).to(x.dtype)


def _turned(x: Tensor, places: Places) -> Tensor:
    half = x.shape[-1] // 2
    exchanged = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x * places.cos.unsqueeze(1) + exchanged * places.sin.unsqueeze(1)


def needed_rows(rows: int, weight: Tensor, padded: PaddedRows) -> int:
    """With how many rows a product of `rows` is computed. A row's bits do not depend on what the others hold."""
    return padded.get((rows, *weight.shape), rows)


def padded_product(x: Tensor, weight: Tensor, padded: PaddedRows) -> Tensor:
    """`x @ weight.T`, computed with as many rows as its shape needs."""
    rows, needed = len(x), needed_rows(len(x), weight, padded)
    if needed == rows:
        return F.linear(x, weight)
    whole = x.new_empty(needed, x.shape[1])
    whole[:rows] = x
    return F.linear(whole, weight)[:rows]


def split_count(longest: int, split: int) -> int:
    """Splits of attention over `longest` tokens."""
    return max(-(-longest // split), 1)
