"""A whole decode step of a dense model as one kernel, in bfloat16 or in float32, of weights in 4 bits or float32.

With 4 bits a weight the products of a step take less time than calling them: of 13 ms at one row of 30 layers, 6
were products, 2 the head and the rest calls; this takes 3 for all layers (at 8 rows 15 for 29). Weights of float32
take the time of reading them once, 14 ms, which the library does at two thirds of the memory's speed; those that came
out of 4 bits are read as such and made the same float32 numbers again on the way, in 4 ms. Each thread runs through
all layers on its share of every product, and they meet five times a layer. What all threads need of a row (its norm,
its rounding to bfloat16) each computes for itself, which costs less than another meeting.

Each output is computed in one fixed order from its row alone, so a row's bits depend neither on the rows beside it
nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from worker.attention_kernels import EVERYTHING
from worker.cpu_kernels import Floats, Ints, PoolRows, as_array, norm_row, put_row, turn_head
from worker.cpu_threads import in_parts
from worker.decode_kernels import attend_head
from worker.int4 import Int4Linear, Tiles, untiled
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.meeting import meet
from worker.models.llama import Layer, LlamaModel
from worker.product_ops import GROUP, RUN, TILE, dense, exact_4, packed_1, packed_2, packed_4
from worker.row_head import Head, RowHead, head_rows
from worker.tiled_linear import FloatTiles, TiledLinear, float_tiles

AnyTiles = Tiles | FloatTiles
_ROWS = 8  # the most rows that one tile is multiplied with at a time

_kernel = njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})


class _Weights(NamedTuple):
    """Those of all layers, the layer always the first dimension."""

    qkv: AnyTiles
    out: AnyTiles
    gate: AnyTiles
    up: AnyTiles
    down: AnyTiles
    norms: Floats  # [layers, 2, hidden]: before attention, before the MLP
    q_norms: Floats  # [layers, head_dim], or [layers, 0]
    k_norms: Floats
    biases: Floats  # [layers, qkv outputs], or [layers, 0]
    norm: Floats  # the last one, [hidden]
    head: Head
    eps: float


class _Room(NamedTuple):
    """What the threads hand each other, float32 [rows, ...], and the counter of their meetings."""

    qkv: Floats
    mixed: Floats
    gated: Floats
    counter: Ints


class WholeStep:
    """The layers of `model` and its head for decode, over the blocks of `cache`: bfloat16 for packed weights."""

    def __init__(self, model: LlamaModel, cache: KVCache, head: RowHead) -> None:
        """Takes over the tiles of the model's layers."""
        layers = model.layers
        self._model = model
        (memory,) = cache.memories
        self._embedding = as_array(model.embedding)
        self._memory = as_array(memory.flatten(3, 4))  # [layers, 2, kv_heads, tokens, dim]
        norms = [torch.stack((layer.input_norm, layer.post_norm)) for layer in layers]
        heads = [layer.head_norms for layer in layers]
        none = torch.empty(0)
        biases = [none if layer.qkv.bias is None else layer.qkv.bias.float() for layer in layers]
        products = zip(*map(_products, layers), strict=True)
        (qkv, out, gate, up, down), grown = zip(*map(_stacked, products), strict=True)
        model.weight_bytes += sum(grown)
        self._weights = _Weights(
            qkv,
            out,
            gate,
            up,
            down,
            torch.stack(norms).numpy(),
            torch.stack([none if pair is None else pair.q for pair in heads]).numpy(),
            torch.stack([none if pair is None else pair.k for pair in heads]).numpy(),
            torch.stack(biases).numpy(),
            model.norm.numpy(),
            head.weight,
            model.config.rms_norm_eps,
        )

    @classmethod
    def of(cls, model: object, cache: KVCache) -> WholeStep | None:
        """None for a model without tiles, or where the cache does not hold arrays of the type of its products."""
        if not isinstance(model, LlamaModel) or not model.in_tiles or not isinstance(model.head, RowHead):
            return None
        return cls(model, cache, model.head) if cache.has_arrays and cache.dtype == model.dtype else None

    def __call__(self, token_ids: Tensor, tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Float32 logits [rows, vocab] of one token for each sequence, at position `lengths[i]` of it."""
        model, config = self._model, self._model.config
        rows = len(lengths)
        # Not by the library, whose threads spin for a while after such a copy, on the cores that are needed next.
        x = self._embedding[token_ids.numpy()]
        if x.dtype == np.uint16:
            x = (x.astype(np.uint32) << 16).view(np.float32)
        places = np.zeros((rows, max(map(len, tables))), dtype=np.int64)
        for row, table in enumerate(tables):
            places[row, : len(table)] = table
        positions = torch.tensor(lengths)
        cos, sin = model.rotary.rows(positions)
        heads = config.num_heads * config.head_dim
        room = _Room(
            np.empty((rows, heads + 2 * config.num_kv_heads * config.head_dim), np.float32),
            np.empty((rows, heads), np.float32),
            np.empty((rows, config.intermediate_size), np.float32),
            np.zeros(1, np.int64),
        )
        given = x, self._weights, self._memory, places, positions.numpy(), cos.numpy(), sin.numpy(), room
        logits = torch.empty(rows, config.vocab_size)
        out = logits.numpy()
        in_parts(torch.get_num_threads(), lambda part, parts: _step(*given, part, parts, out))
        return logits


def _products(layer: Layer) -> list[Int4Linear | TiledLinear]:
    """Those of a layer in the order of `_Weights`."""
    linears = [layer.qkv, layer.out, layer.gate, layer.up, layer.down]
    assert all(isinstance(linear, Int4Linear | TiledLinear) for linear in linears)
    return linears  # type: ignore[return-value]


def _stacked(linears: Sequence[Int4Linear | TiledLinear]) -> tuple[AnyTiles, int]:
    """The tiles of one product in all layers, and the bytes by which they grew.

    The linears then hold views of them, so that nothing is held twice.
    """
    found: list[AnyTiles] = []
    for linear in linears:
        assert linear.tiles is not None
        found.append(linear.tiles)
    before = sum(part.nbytes for tiles in found for part in tiles)
    if len({type(tiles) for tiles in found}) > 1:  # some layer's values do not go into 4 bits
        found = [float_tiles(untiled(tiles)) if isinstance(tiles, Tiles) else tiles for tiles in found]
    kind = type(found[0])
    stacked = [np.stack(parts) for parts in zip(*found, strict=True)]
    for layer, linear in enumerate(linears):
        linear.tiles = kind(*(part[layer] for part in stacked))
    return kind(*stacked), sum(part.nbytes for part in stacked) - before


@_kernel
def _step(
    x: Floats,
    weights: _Weights,
    memory: PoolRows,
    tables: Ints,
    lengths: Ints,
    cos: Floats,
    sin: Floats,
    room: _Room,
    part: int,
    parts: int,
    logits: Floats,
) -> None:
    """This thread's share of all layers and of the head; x [rows, hidden] moves on in place."""
    hidden, widest = x.shape[1], max(x.shape[1], room.mixed.shape[1], room.gated.shape[1])
    given = np.empty((len(x), widest), memory.dtype)
    sums = np.empty((len(x), widest // GROUP), np.float32)
    normed = np.empty((len(x), hidden), np.float32)
    row = normed[0]
    tile = np.empty((2, _ROWS, TILE), np.float32)
    eps = np.float32(weights.eps)
    at = room.counter.ctypes.data
    met = 0
    for layer in range(len(memory)):
        _norm(x, weights.norms[layer, 0], eps, row, given, sums)
        _product(weights.qkv, layer, given, sums, hidden, part, parts, tile[0], room.qkv, False)
        met += parts
        meet(at, met)
        _attend(weights, layer, memory[layer], tables, lengths, cos, sin, room, part, parts)
        met += parts
        meet(at, met)
        for r in range(len(x)):
            _take(room.mixed[r], given[r], sums[r])
        _product(weights.out, layer, given, sums, room.mixed.shape[1], part, parts, tile[0], x, True)
        met += parts
        meet(at, met)
        _norm(x, weights.norms[layer, 1], eps, row, given, sums)
        _gate(weights, layer, given, sums, hidden, part, parts, tile, room.gated)
        met += parts
        meet(at, met)
        for r in range(len(x)):
            _take(room.gated[r], given[r], sums[r])
        _product(weights.down, layer, given, sums, room.gated.shape[1], part, parts, tile[0], x, True)
        met += parts
        meet(at, met)
    for r in range(len(x)):
        norm_row(x[r], weights.norm, eps, np.float32(hidden), normed[r])
    head_rows(normed, weights.head, part, parts, logits)


@_kernel
def _norm(x: Floats, weight: Floats, eps: np.float32, row: Floats, given: PoolRows, sums: Floats) -> None:
    """All rows normed and made inputs as `_take` does; `row` [hidden] is room to work in."""
    for r in range(len(x)):
        norm_row(x[r], weight, eps, np.float32(x.shape[1]), row)
        _take(row, given[r], sums[r])


def _take(x: Any, given: Any, sums: Any) -> None:
    """Make a row the inputs of a product: for packed weights in bfloat16, with the sums of its groups as rounded."""
    raise NotImplementedError("for compiled code only")


@overload(_take)
def _take_as(x: Any, given: Any, sums: Any) -> Any:
    def same(x: Any, given: Any, sums: Any) -> None:
        given[: len(x)] = x

    def rounded(x: Any, given: Any, sums: Any) -> None:
        bits = x.view(np.uint32)
        for group in range(len(x) // GROUP):
            total = np.float32(0)
            for i in range(group * GROUP, group * GROUP + GROUP):
                odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
                half = (bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
                given[i] = np.uint16(half)
                total += np.uint32(half << np.uint32(16)).view(np.float32)
            sums[group] = total

    return rounded if given.dtype is types.uint16 else same


def _tile(matrix: Any, layer: Any, index: Any, given: Any, sums: Any, size: Any, first: Any, out: Any) -> Any:
    """One tile of outputs of some rows from `first` on, to out [_ROWS, TILE]. Returns how many rows."""
    raise NotImplementedError("for compiled code only")


@overload(_tile)
def _tile_of(matrix: Any, layer: Any, index: Any, given: Any, sums: Any, size: Any, first: Any, out: Any) -> Any:
    def rounded(
        matrix: Any, layer: Any, index: Any, given: Any, sums: Any, size: Any, first: Any, out: Any
    ) -> Any:
        levels, scales = matrix.levels[layer, index].ctypes.data, matrix.scales[layer, index].ctypes.data
        groups = size // GROUP
        x, x_bytes = given[first].ctypes.data, given.strides[0]
        s, s_bytes = sums[first].ctypes.data, sums.strides[0]
        left = len(given) - first
        if left >= 4:
            packed_4(levels, scales, groups, x, x_bytes, s, s_bytes, out.ctypes.data)
            return 4
        if left >= 2:
            packed_2(levels, scales, groups, x, x_bytes, s, s_bytes, out.ctypes.data)
            return 2
        packed_1(levels, scales, groups, x, x_bytes, s, s_bytes, out.ctypes.data)
        return 1

    def exact(matrix: Any, layer: Any, index: Any, given: Any, sums: Any, size: Any, first: Any, out: Any) -> Any:
        levels, scales = matrix.levels[layer, index].ctypes.data, matrix.scales[layer, index].ctypes.data
        return exact_4(levels, scales, size // GROUP, given, first, out.ctypes.data)

    def wide(matrix: Any, layer: Any, index: Any, given: Any, sums: Any, size: Any, first: Any, out: Any) -> Any:
        return dense(matrix.values[layer, index].ctypes.data, 0, size // RUN, given, first, out.ctypes.data)

    if matrix.instance_class is FloatTiles:
        return wide
    return rounded if given.dtype is types.uint16 else exact


@_kernel
def _product(
    matrix: AnyTiles,
    layer: int,
    given: PoolRows,
    sums: Floats,
    size: int,
    part: int,
    parts: int,
    tile: Floats,
    out: Floats,
    onto: bool,
) -> None:
    """This thread's tiles of the product of all rows, written to `out`, or added to it where `onto`."""
    tiles = matrix[0].shape[1]
    for index in range(tiles * part // parts, tiles * (part + 1) // parts):
        first = 0
        while first < len(given):
            rows = _tile(matrix, layer, index, given, sums, size, first, tile)
            for r in range(rows):
                for i in range(TILE):
                    had = out[first + r, index * TILE + i] if onto else np.float32(0)
                    out[first + r, index * TILE + i] = had + tile[r, i]
            first += rows


@_kernel
def _gate(
    weights: _Weights,
    layer: int,
    given: PoolRows,
    sums: Floats,
    size: int,
    part: int,
    parts: int,
    tile: Floats,
    out: Floats,
) -> None:
    """This thread's tiles of silu(gate) * up."""
    tiles = weights.gate[0].shape[1]
    for index in range(tiles * part // parts, tiles * (part + 1) // parts):
        first = 0
        while first < len(given):
            rows = _tile(weights.gate, layer, index, given, sums, size, first, tile[0])
            _tile(weights.up, layer, index, given, sums, size, first, tile[1])
            for r in range(rows):
                for i in range(TILE):
                    gate = tile[0, r, i]
                    out[first + r, index * TILE + i] = gate / (np.float32(1) + np.exp(-gate)) * tile[1, r, i]
            first += rows


@_kernel
def _attend(
    weights: _Weights,
    layer: int,
    pool: PoolRows,
    tables: Ints,
    lengths: Ints,
    cos: Floats,
    sin: Floats,
    room: _Room,
    part: int,
    parts: int,
) -> None:
    """This thread's pairs of a row and a key-value head: turn and store what is new, then attend."""
    kv_heads, _, dim = pool.shape[1:]
    heads = room.mixed.shape[1] // dim
    group = heads // kv_heads
    scale, eps = np.float32(1.0 / math.sqrt(dim)), np.float32(weights.eps)
    query, turned = np.empty((group, dim), np.float32), np.empty(dim, np.float32)
    scores = np.empty((group, lengths.max() + 1), np.float32)
    bias = weights.biases[layer]
    for task in range(part, len(lengths) * kv_heads, parts):
        row, kv_head = task // kv_heads, task % kv_heads
        parts_of_row = room.qkv[row]
        first, key, value = kv_head * group * dim, (heads + kv_head) * dim, (heads + kv_heads + kv_head) * dim
        if len(bias):
            for i in range(group * dim):
                parts_of_row[first + i] += bias[first + i]
            for i in range(dim):
                parts_of_row[key + i] += bias[key + i]
                parts_of_row[value + i] += bias[value + i]
        for member in range(group):
            start = first + member * dim
            turn_head(parts_of_row[start : start + dim], cos[row], sin[row], weights.q_norms[layer], eps, turned)
            for i in range(dim):
                query[member, i] = turned[i] * scale
        token = tables[row, lengths[row] // BLOCK_TOKENS] * BLOCK_TOKENS + lengths[row] % BLOCK_TOKENS
        turn_head(parts_of_row[key : key + dim], cos[row], sin[row], weights.k_norms[layer], eps, turned)
        put_row(turned, pool[0, kv_head, token])
        put_row(parts_of_row[value : value + dim], pool[1, kv_head, token])
        mixed = room.mixed[row, first : first + group * dim].reshape(group, dim)
        keys, values = pool[0, kv_head], pool[1, kv_head]
        attend_head(query, keys, values, tables[row], lengths[row], BLOCK_TOKENS, EVERYTHING, scores, mixed)
