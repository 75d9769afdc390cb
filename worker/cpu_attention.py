"""Attention over the paged pool on a CPU, by our own kernels: every row in one fixed order, whatever its company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.attention_kernels import EVERYTHING, attend_prefill
from worker.cpu_kernels import Floats, Ints, PoolRows, as_array, store_rows
from worker.cpu_threads import in_parts
from worker.decode_kernels import attend_rows, decode_rows
from worker.heads import HeadNorms
from worker.kv_cache import BLOCK_TOKENS
from worker.layer_plan import LayerPlan
from worker.rope import Rotary

_NO_NORM = np.empty(0, np.float32)
_NO_ROWS = np.empty(0, np.int64)
# Where a second thread pays. Waking it costs up to 0.5 ms a layer, as the library's own threads still spin on the
# cores: measured at 8 rows behind 200 tokens each, a step of 30 layers took 55 ms split and 35 ms not.
_SPLIT_TOKENS = 8192  # keys of a decode pass
_SPLIT_PAIRS = 1 << 16  # rows times keys of a prefill pass


class _Given(NamedTuple):
    """The arguments of `store_rows`."""

    qkv: PoolRows
    cos: Floats
    sin: Floats
    q_weight: Floats
    k_weight: Floats
    eps: float
    keys: PoolRows
    values: PoolRows
    tokens: Ints
    queries: Floats


class _Rows:
    """Rows of a pass at `positions`, of which those with a place in `tokens` are real."""

    def __init__(
        self, layers: Mapping[int, LayerPlan], rotaries: Sequence[Rotary], positions: Tensor, tokens: Ints
    ) -> None:
        self.layers = layers
        self._tokens = tokens
        self._turns = [(cos.numpy(), sin.numpy()) for cos, sin in (rotary.rows(positions) for rotary in rotaries)]

    def given(self, plan: LayerPlan, qkv: Tensor, norms: HeadNorms | None) -> _Given:
        """What `store_rows` takes: keys and values go into the pool, where the rows have any."""
        assert plan.arrays is not None
        cos, sin = self._turns[plan.rotary]
        q, k, eps = (_NO_NORM, _NO_NORM, 0.0) if norms is None else (norms.q.numpy(), norms.k.numpy(), norms.eps)
        queries = np.empty((plan.shape.num_heads, qkv.shape[0], plan.shape.head_dim), np.float32)
        tokens = self._tokens if plan.stores else _NO_ROWS
        return _Given(as_array(qkv), cos, sin, q, k, eps, *plan.arrays, tokens, queries)


class CpuPrefillAttention:
    """`attend` for `count` rows of one sequence from `start` on; those past the first `rows` are padding."""

    def __init__(
        self,
        layers: Mapping[int, LayerPlan],
        rotaries: Sequence[Rotary],
        blocks: Sequence[int],
        start: int,
        rows: int,
        count: int,
    ) -> None:
        self._blocks = np.array(blocks, dtype=np.int64)
        self._start, self._count = start, rows
        real = np.arange(start, start + rows)
        tokens = self._blocks[real // BLOCK_TOKENS] * BLOCK_TOKENS + real % BLOCK_TOKENS
        self._rows = _Rows(layers, rotaries, torch.arange(start, start + count), tokens)
        self._threads = torch.get_num_threads() if rows * (start + rows) >= _SPLIT_PAIRS else 1

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """Rows [count, heads * dim]; those of padding are zero."""
        plan = self._rows.layers[layer]
        given = self._rows.given(plan, qkv, norms)
        store_rows(*given)
        out = torch.zeros(qkv.shape[0], plan.shape.num_heads, plan.shape.head_dim)
        attend_prefill(
            given.queries,
            self._count,
            given.keys,
            given.values,
            self._blocks,
            BLOCK_TOKENS,
            self._start,
            plan.window or EVERYTHING,
            self._threads,
            out.numpy(),
        )
        return out.flatten(1).to(qkv.dtype)


class CpuDecodeAttention:
    """`attend` for one new token of each sequence, at position `lengths[i]`, and padding up to `count` rows."""

    def __init__(
        self,
        layers: Mapping[int, LayerPlan],
        rotaries: Sequence[Rotary],
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        count: int,
    ) -> None:
        self._lengths = np.array(lengths, dtype=np.int64)
        self._tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, table in enumerate(tables):
            self._tables[row, : len(table)] = table
        last = self._tables[np.arange(len(lengths)), self._lengths // BLOCK_TOKENS]
        tokens = last * BLOCK_TOKENS + self._lengths % BLOCK_TOKENS
        positions = torch.tensor([*lengths, *[0] * (count - len(lengths))])
        self._rows = _Rows(layers, rotaries, positions, tokens)
        self._parts = torch.get_num_threads() if sum(lengths) >= _SPLIT_TOKENS else 1

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """Rows [count, heads * dim]; those of padding are zero."""
        plan = self._rows.layers[layer]
        given = self._rows.given(plan, qkv, norms)
        out = torch.zeros(qkv.shape[0], plan.shape.num_heads, plan.shape.head_dim)
        mixed = out.numpy()
        where = self._tables, self._lengths, BLOCK_TOKENS, plan.window or EVERYTHING
        if self._parts == 1:
            decode_rows(*given, *where, mixed)
            return out.flatten(1).to(qkv.dtype)
        store_rows(*given)
        pool = given.queries, given.keys, given.values
        in_parts(self._parts, lambda part, parts: attend_rows(*pool, *where, part, parts, mixed))  # type: ignore[arg-type]
        return out.flatten(1).to(qkv.dtype)
