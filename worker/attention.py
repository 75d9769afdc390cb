"""Attention over the paged pool, with bits that do not depend on how rows are grouped.

Measured for torch's CPU kernel (2.13, float32 and bfloat16): with the key length rounded up to an absolute multiple
of 512 and masked, a query row had the same bits for every tile of 8 to 256 rows, every position in the tile, and
any number of further masked keys (0 of 320 unequal; with multiples of 64 it was 19). One-row products differ, so
decode pads the query heads of a KV head to a multiple of four (0 of 990 unequal). `row_check.py` repeats the check
at start on the machine at hand.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.cpu_kernels import Floats, attend_rows, store_rows
from worker.heads import HeadNorms, split_heads
from worker.kv_cache import BLOCK_TOKENS, BlockRun, KVCache
from worker.rope import RotaryTable

KEY_MULTIPLE = 512
_HEAD_MULTIPLE = 4
_NO_NORM = np.empty(0, np.float32)


def padded_keys(length: int, multiple: int = KEY_MULTIPLE) -> int:
    """Key length that attention over `length` tokens runs at."""
    return -(-length // multiple) * multiple


def block_list(blocks: list[int], keys: int, num_blocks: int, device: torch.device) -> BlockRun | Tensor:
    """`blocks` extended to `keys` tokens: in place where they are consecutive, else with the zero block."""
    wanted = keys // BLOCK_TOKENS
    used = blocks[:wanted]
    first = used[0]
    if first + wanted <= num_blocks and used == list(range(first, first + len(used))):
        return BlockRun(first, wanted)
    return torch.tensor(used + [0] * (wanted - len(used)), dtype=torch.int64, device=device)


class PrefillAttention:
    """Causal attention of `count` rows of one sequence (the last `count - rows` are padding) from `start` on.

    Keys and values of the real rows go to `token_rows` of the pool before they are read back with the prefix.
    """

    def __init__(
        self,
        cache: KVCache,
        rotary: RotaryTable,
        blocks: list[int],
        start: int,
        rows: int,
        count: int,
        key_multiple: int,
    ) -> None:
        device = cache.memory.device
        self._cache = cache
        self._rows = rows
        positions = torch.arange(start, start + count, device=device)
        self._cos, self._sin = rotary.rows(positions)
        real = positions[:rows]
        table = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._token_rows = table[real // BLOCK_TOKENS] * BLOCK_TOKENS + real % BLOCK_TOKENS
        keys = padded_keys(start + rows, key_multiple)
        self._blocks = block_list(blocks, keys, cache.num_blocks, device)
        allowed = torch.arange(keys, device=device) <= positions[:, None]
        self._mask = _additive(allowed, cache.memory.dtype)

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        queries = self._store(layer, qkv, norms)
        keys, values = self._cache.read(layer, self._blocks)
        mixed = F.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=self._mask,
            enable_gqa=queries.shape[0] != keys.shape[0],
        )
        return mixed.squeeze(0).transpose(0, 1).flatten(1).to(qkv.dtype)

    def _store(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """Keys and values into the pool; the queries [heads, rows, dim]."""
        cache = self._cache
        if cache.has_arrays:
            rows, parts, dim = qkv.shape
            queries = torch.empty(parts - 2 * cache.kv_heads, rows, dim)
            keys, values = cache.arrays(layer)
            factors = self._cos.numpy(), self._sin.numpy(), *_norm_arrays(norms)
            store_rows(qkv.numpy(), *factors, keys, values, self._token_rows.numpy(), queries.numpy())
            return queries
        q, k, v = split_heads(qkv, cache.kv_heads, norms, self._cos, self._sin)
        cache.write(layer, self._token_rows, k[: self._rows], v[: self._rows])
        return q.to(cache.memory.dtype).transpose(0, 1)


class DecodeAttention:
    """One new token for each of several sequences; rows past them are padding and attend to nothing.

    Sequences whose padded key length is equal go through one call.
    """

    def __init__(
        self,
        cache: KVCache,
        rotary: RotaryTable,
        tables: list[list[int]],
        lengths: list[int],
        count: int,
        key_multiple: int,
    ) -> None:
        device = cache.memory.device
        self._cache = cache
        self._real = len(lengths)
        positions = torch.tensor(lengths + [0] * (count - len(lengths)), device=device)
        self._cos, self._sin = rotary.rows(positions)
        rows = [
            table[length // BLOCK_TOKENS] * BLOCK_TOKENS + length % BLOCK_TOKENS
            for table, length in zip(tables, lengths, strict=True)
        ]
        self._token_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        by_keys: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_keys.setdefault(padded_keys(length + 1, key_multiple), []).append(index)
        self._groups: list[tuple[Tensor, BlockRun | Tensor, Tensor]] = []
        for keys, members in by_keys.items():
            rows_of = torch.tensor(members, dtype=torch.int64, device=device)
            if len(members) == 1:
                blocks = block_list(tables[members[0]], keys, cache.num_blocks, device)
            else:
                wanted = keys // BLOCK_TOKENS
                padded = [tables[m][:wanted] + [0] * (wanted - len(tables[m][:wanted])) for m in members]
                blocks = torch.tensor(padded, dtype=torch.int64, device=device).flatten()
            allowed = torch.arange(keys, device=device) <= positions[rows_of, None]
            self._groups.append((rows_of, blocks, _additive(allowed, cache.memory.dtype)[:, None, None, :]))

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        q, k, v = split_heads(qkv, self._cache.kv_heads, norms, self._cos, self._sin)
        count, heads, dim = q.shape
        real = self._real
        self._cache.write(layer, self._token_rows, k[:real], v[:real])
        out = q.new_zeros(count, heads * dim)
        for index, blocks, mask in self._groups:
            keys, values = self._cache.read(layer, blocks)
            kv_heads, size = keys.shape[0], len(index)
            per_kv = heads // kv_heads
            padded = -(-per_kv // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
            queries = keys.new_zeros(size, kv_heads, padded, dim)
            queries[:, :, :per_kv] = q[index].view(size, kv_heads, per_kv, dim)
            mixed = F.scaled_dot_product_attention(
                queries,
                keys.view(kv_heads, size, -1, dim).transpose(0, 1) if size > 1 else keys.unsqueeze(0),
                values.view(kv_heads, size, -1, dim).transpose(0, 1) if size > 1 else values.unsqueeze(0),
                attn_mask=mask.expand(size, 1, padded, -1),
            )
            out[index] = mixed[:, :, :per_kv].reshape(size, heads * dim).to(q.dtype)
        return out


class CpuDecodeAttention:
    """`DecodeAttention` for float32 pools on a CPU, by our own kernel: each row in one fixed order."""

    def __init__(
        self, cache: KVCache, rotary: RotaryTable, tables: list[list[int]], lengths: list[int], count: int
    ) -> None:
        self._cache = cache
        self._lengths = np.array(lengths, dtype=np.int64)
        self._tables = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, table in enumerate(tables):
            self._tables[row, : len(table)] = table
        cos, sin = rotary.rows(torch.tensor(lengths + [0] * (count - len(lengths))))
        self._cos, self._sin = cos.numpy(), sin.numpy()

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        count, parts, dim = qkv.shape
        out = torch.empty(count, parts - 2 * self._cache.kv_heads, dim)
        keys, values = self._cache.arrays(layer)
        attend_rows(
            qkv.numpy(),
            self._cos,
            self._sin,
            *_norm_arrays(norms),
            keys,
            values,
            self._tables,
            self._lengths,
            BLOCK_TOKENS,
            out.numpy(),
        )
        return out.flatten(1)


def _norm_arrays(norms: HeadNorms | None) -> tuple[Floats, Floats, float]:
    if norms is None:
        return _NO_NORM, _NO_NORM, 0.0
    return norms.q.numpy(), norms.k.numpy(), norms.eps


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def decode_attention(
    cache: KVCache,
    rotary: RotaryTable,
    tables: list[list[int]],
    lengths: list[int],
    count: int,
    key_multiple: int,
) -> CpuDecodeAttention | DecodeAttention:
    """The decode attention of `count` rows that suits the pool."""
    if cache.has_arrays:
        return CpuDecodeAttention(cache, rotary, tables, lengths, count)
    return DecodeAttention(cache, rotary, tables, lengths, count, key_multiple)
