"""Attention over the paged pool, with bits that do not depend on how rows are grouped.

On a CPU our own kernels see to that (`cpu_attention.py`); elsewhere, or for head sizes that they do not take, it is
torch's. Measured for torch's CPU kernel (2.13, float32 and bfloat16): with the key length rounded up to an absolute
multiple of 512 and masked, a query row had the same bits for every tile of 8 to 256 rows, every position in the
tile, and any number of further masked keys (0 of 320 unequal; with multiples of 64 it was 19). One-row products
differ, so decode pads the query heads of a KV head to a multiple of four (0 of 990 unequal). Where a window hides the
first keys, they are left out up to such a multiple too. `row_check.py` repeats the check at start on the machine at
hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.cpu_attention import CpuDecodeAttention, CpuPrefillAttention
from worker.heads import HeadNorms, split_heads, turned_queries
from worker.kv_cache import BLOCK_TOKENS, BlockRun, KVCache
from worker.layer_plan import LayerPlan
from worker.model_shape import AttentionLayer, Rope
from worker.models.interface import Attend
from worker.rope import Rotary

KEY_MULTIPLE = 512
_HEAD_MULTIPLE = 4


class PagedAttention:
    """The attention of a model over a cache: makes the `attend` of each pass."""

    def __init__(self, cache: KVCache, rotaries: Mapping[Rope, Rotary]) -> None:
        self.cache = cache
        ropes = list(rotaries)
        self.rotaries = list(rotaries.values())
        self.layers: dict[int, LayerPlan] = {
            index: LayerPlan(
                shape,
                ropes.index(shape.rope),
                shape.window or 0,
                shape.shares_kv_with is None,
                cache.arrays(index) if cache.has_arrays else None,
            )
            for index, shape in enumerate(cache.layers)
            if isinstance(shape, AttentionLayer)
        }
        self.windows = {plan.window for plan in self.layers.values()}

    def prefill(self, blocks: list[int], start: int, rows: int, count: int, key_multiple: int) -> Attend:
        """For `count` rows of one sequence from `start` on; those past the first `rows` are padding."""
        if self.cache.has_arrays:
            return CpuPrefillAttention(self.layers, self.rotaries, blocks, start, rows, count)
        return PrefillAttention(self, blocks, start, rows, count, key_multiple)

    def decode(self, tables: list[list[int]], lengths: list[int], count: int, key_multiple: int) -> Attend:
        """For one new token of each sequence, at position `lengths[i]`, and padding up to `count` rows."""
        if self.cache.has_arrays:
            return CpuDecodeAttention(self.layers, self.rotaries, tables, lengths, count)
        return DecodeAttention(self, tables, lengths, count, key_multiple)


def padded_keys(length: int, multiple: int = KEY_MULTIPLE) -> int:
    """Key length that attention over `length` tokens runs at."""
    return -(-length // multiple) * multiple


def first_key(position: int, window: int, multiple: int) -> int:
    """Where the keys of a row begin, those before a window left out by whole multiples."""
    return max(position + 1 - window, 0) // multiple * multiple if window else 0


def block_list(
    blocks: list[int], keys: int, num_blocks: int, device: torch.device, first: int = 0
) -> BlockRun | Tensor:
    """The part of `blocks` for tokens [first, keys): in place where consecutive, else up to there with block 0."""
    used = blocks[first // BLOCK_TOKENS : keys // BLOCK_TOKENS]
    wanted = (keys - first) // BLOCK_TOKENS
    start = used[0]
    if start + wanted <= num_blocks and used == list(range(start, start + len(used))):
        return BlockRun(start, wanted)
    return torch.tensor(used + [0] * (wanted - len(used)), dtype=torch.int64, device=device)


class _Keys(NamedTuple):
    """Which keys the rows of a pass are offered, and the additive mask over them."""

    blocks: BlockRun | Tensor
    mask: Tensor


class PrefillAttention:
    """Causal attention of `count` rows of one sequence (the last `count - rows` are padding) from `start` on.

    Keys and values of the real rows go to their places in the pool before they are read back with the prefix.
    """

    def __init__(
        self, paged: PagedAttention, blocks: list[int], start: int, rows: int, count: int, key_multiple: int
    ) -> None:
        cache = paged.cache
        device = cache.device
        self._cache = cache
        self._layers = paged.layers
        self._rows = rows
        positions = torch.arange(start, start + count, device=device)
        self._turns = [rotary.rows(positions) for rotary in paged.rotaries]
        real = positions[:rows]
        table = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._token_rows = table[real // BLOCK_TOKENS] * BLOCK_TOKENS + real % BLOCK_TOKENS
        keys = padded_keys(start + rows, key_multiple)
        self._keys: dict[int, _Keys] = {}
        for window in paged.windows:
            first = first_key(start, window, key_multiple)
            # Padding sees what the last row sees: its own window may hold no key at all.
            mask = _mask(positions.clamp(max=start + rows - 1) if window else positions, first, keys, window)
            listed = block_list(blocks, keys, cache.num_blocks, device, first)
            self._keys[window] = _Keys(listed, _additive(mask, cache.dtype))

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        plan = self._layers[layer]
        queries = self._store(layer, plan, qkv, norms)
        blocks, mask = self._keys[plan.window]
        keys, values = self._cache.read(layer, blocks)
        mixed = F.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=queries.shape[0] != keys.shape[0],
        )
        return mixed.squeeze(0).transpose(0, 1).flatten(1).to(qkv.dtype)

    def _store(self, layer: int, plan: LayerPlan, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        """Keys and values into the pool, where the rows have any; the queries [heads, rows, dim]."""
        cos, sin = self._turns[plan.rotary]
        if plan.stores:
            q, k, v = split_heads(qkv, plan.shape.num_kv_heads, norms, cos, sin)
            self._cache.write(layer, self._token_rows, k[: self._rows], v[: self._rows])
        else:
            q = turned_queries(qkv, norms, cos, sin)
        return q.to(self._cache.dtype).transpose(0, 1)


class _Group(NamedTuple):
    """Sequences whose keys begin and end at the same multiples: they go through one call."""

    members: Tensor
    blocks: BlockRun | Tensor
    mask: Tensor


class DecodeAttention:
    """One new token for each of several sequences; rows past them are padding and attend to nothing."""

    def __init__(
        self, paged: PagedAttention, tables: list[list[int]], lengths: list[int], count: int, key_multiple: int
    ) -> None:
        cache = paged.cache
        device = cache.device
        self._cache = cache
        self._layers = paged.layers
        self._real = len(lengths)
        positions = torch.tensor(lengths + [0] * (count - len(lengths)), device=device)
        self._turns = [rotary.rows(positions) for rotary in paged.rotaries]
        rows = [
            table[length // BLOCK_TOKENS] * BLOCK_TOKENS + length % BLOCK_TOKENS
            for table, length in zip(tables, lengths, strict=True)
        ]
        self._token_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._groups = {
            window: self._grouped(tables, lengths, positions, window, key_multiple) for window in paged.windows
        }

    def _grouped(
        self, tables: list[list[int]], lengths: list[int], positions: Tensor, window: int, multiple: int
    ) -> list[_Group]:
        device, dtype = self._cache.device, self._cache.dtype
        alike: dict[tuple[int, int], list[int]] = {}
        for index, length in enumerate(lengths):
            span = first_key(length, window, multiple), padded_keys(length + 1, multiple)
            alike.setdefault(span, []).append(index)
        groups = []
        for (first, keys), members in alike.items():
            rows = torch.tensor(members, dtype=torch.int64, device=device)
            if len(members) == 1:
                blocks = block_list(tables[members[0]], keys, self._cache.num_blocks, device, first)
            else:
                wanted = (keys - first) // BLOCK_TOKENS
                parts = [tables[member][first // BLOCK_TOKENS : keys // BLOCK_TOKENS] for member in members]
                padded = [part + [0] * (wanted - len(part)) for part in parts]
                blocks = torch.tensor(padded, dtype=torch.int64, device=device).flatten()
            mask = _additive(_mask(positions[rows], first, keys, window), dtype)
            groups.append(_Group(rows, blocks, mask[:, None, None, :]))
        return groups

    def __call__(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        plan = self._layers[layer]
        cos, sin = self._turns[plan.rotary]
        if plan.stores:
            q, k, v = split_heads(qkv, plan.shape.num_kv_heads, norms, cos, sin)
            self._cache.write(layer, self._token_rows, k[: self._real], v[: self._real])
        else:
            q = turned_queries(qkv, norms, cos, sin)
        count, heads, dim = q.shape
        out = q.new_zeros(count, heads * dim)
        for members, blocks, mask in self._groups[plan.window]:
            keys, values = self._cache.read(layer, blocks)
            kv_heads, size = keys.shape[0], len(members)
            per_kv = heads // kv_heads
            padded = -(-per_kv // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
            queries = keys.new_zeros(size, kv_heads, padded, dim)
            queries[:, :, :per_kv] = q[members].view(size, kv_heads, per_kv, dim)
            mixed = F.scaled_dot_product_attention(
                queries,
                keys.view(kv_heads, size, -1, dim).transpose(0, 1) if size > 1 else keys.unsqueeze(0),
                values.view(kv_heads, size, -1, dim).transpose(0, 1) if size > 1 else values.unsqueeze(0),
                attn_mask=mask.expand(size, 1, padded, -1),
            )
            out[members] = mixed[:, :, :per_kv].reshape(size, heads * dim).to(q.dtype)
        return out


def _mask(positions: Tensor, first: int, keys: int, window: int) -> Tensor:
    """Which of the tokens [first, keys) the rows at `positions` see."""
    tokens = torch.arange(first, keys, device=positions.device)
    seen = tokens <= positions[:, None]
    return seen & (tokens > positions[:, None] - window) if window else seen


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
