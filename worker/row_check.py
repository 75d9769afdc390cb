"""Which row counts give a row the same bits, found out on this machine at start (design, Exactness 1 to 3).

A hit is bit-identical to a cold run only if a row's result does not depend on how many rows, or which, were computed
with it. Libraries do not promise that, so each listed count is compared with the reference count here, over one layer
of each shape with the real weights, the head, and attention at several alignments. A count that fails leaves the list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention import KEY_MULTIPLE, PagedAttention, padded_keys
from worker.delta_rule import DeltaWeights
from worker.heads import HeadNorms, split_heads, turned_queries
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.model_shape import AttentionLayer, DeltaLayer
from worker.models.interface import Model
from worker.whole_step import WholeStep

log = logging.getLogger(__name__)

REFERENCE_ROWS = 64
LISTED_ROWS = (4, 8, *range(16, 257, 16))
DECODE_ROWS = 64  # the most that a decode pass runs
MIN_PREFILL_ROWS = 8  # attention over fewer query rows takes another path
HEAD_ROWS = 4  # the row that makes the first token goes through the head in this one shape


@dataclass(frozen=True, slots=True)
class RowCounts:
    """`prefill`: counts proved equal to each other. `decode`: counts that decode may run.

    `batch_invariant` says that decode counts were proved equal too. `key_multiple` is what attention rounds key
    lengths to; `exact` is false if even the reference configuration failed its check.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    key_multiple: int
    batch_invariant: bool
    exact: bool
    padded: tuple[tuple[int, int, int, int], ...] = ()
    """Products of (rows, outputs, inputs) that are computed with more rows, and how many."""


def check_rows(model: Model, kv_dtype: torch.dtype, max_positions: int, deterministic: bool) -> RowCounts:
    """Compare all listed counts on the loaded model. `deterministic` keeps only proved counts for decode."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(LISTED_ROWS),), generator=generator).to(model.device)
    prefill = tuple(c for c in _equal_counts(model, ids, REFERENCE_ROWS) if c >= MIN_PREFILL_ROWS)
    # Decode may run another kernel than prefill does: its counts need to be equal among themselves.
    fewest = min(LISTED_ROWS)
    few = ids[:DECODE_ROWS]
    decode = tuple(c for c in _equal_counts(model, few, fewest) if _head_equal(model, few, c, fewest))
    multiple, exact = _key_multiple(model, kv_dtype, max_positions)
    exact = exact and _step_equal(model, kv_dtype)
    if not deterministic:
        decode = tuple(count for count in LISTED_ROWS if count <= DECODE_ROWS)
    result = RowCounts(prefill or (REFERENCE_ROWS,), decode or (fewest,), multiple, deterministic, exact)
    log.info("row check: %s", result)
    if not exact:
        log.error("row check failed for attention: hits may differ from cold runs in the last bits")
    return result


def _equal_counts(model: Model, ids: Tensor, reference: int) -> list[int]:
    """The listed counts whose rows equal those of passes of `reference` rows, wherever a row stands."""
    equal = []
    expected = torch.cat([_dense_rows(model, part) for part in torch.split(ids, reference)])
    for count in (count for count in LISTED_ROWS if count <= len(ids)):
        starts = {0, min(reference, count) // 2, len(ids) - count}
        if all(
            torch.equal(_dense_rows(model, ids[start : start + count]), expected[start : start + count])
            for start in starts
            if start + count <= len(ids)
        ):
            equal.append(count)
    return equal


def _head_equal(model: Model, ids: Tensor, count: int, reference: int) -> bool:
    """Whether `count` rows give the head's bits of `reference` rows; only the ends are compared, as it is large."""
    rows = model.embed(ids[:count])
    found = model.logits(rows)
    return torch.equal(found[:reference], model.logits(rows[:reference])) and torch.equal(
        found[-reference:], model.logits(rows[-reference:])
    )


def _dense_rows(model: Model, ids: Tensor) -> Tensor:
    """Everything in one layer of each shape but attention and recurrence, which go row by row or are checked apart.

    The queries take the place of attention, gated values that of a recurrence.
    """
    layers = model.config.layers
    turns = {rope: rotary.rows(ids % 7) for rope, rotary in model.rotaries.items()}

    def attend(index: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        shape = layers[index]
        assert isinstance(shape, AttentionLayer)
        cos, sin = turns[shape.rope]
        if shape.shares_kv_with is not None:
            return turned_queries(qkv, norms, cos, sin).flatten(1)
        return split_heads(qkv, shape.num_kv_heads, norms, cos, sin)[0].flatten(1)

    def recur(index: int, inputs: Tensor, gates: Tensor, _weights: DeltaWeights) -> Tensor:
        shape = layers[index]
        assert isinstance(shape, DeltaLayer)
        values = inputs[:, -shape.v_heads * shape.v_dim :].reshape(len(inputs), shape.v_heads, shape.v_dim)
        slow, beta = gates[:, : shape.v_heads, None], gates[:, shape.v_heads :, None]
        return (values * slow * beta).flatten(1)

    return model.forward(ids, attend, num_layers=model.config.layers_of_each_shape, recur=recur)


def _key_multiple(model: Model, dtype: torch.dtype, max_positions: int) -> tuple[int, bool]:
    """The smallest key multiple from `KEY_MULTIPLE` on at which attention rows are equal."""
    multiple = KEY_MULTIPLE
    while not _attention_equal(model, dtype, multiple):
        if multiple >= max_positions:
            return multiple, False
        multiple *= 2
    return multiple, True


def _attention_equal(model: Model, dtype: torch.dtype, multiple: int) -> bool:
    """Whether rows of every attention layer that differs from the others are equal however they are grouped."""
    first: dict[AttentionLayer, int] = {}
    for index, layer in enumerate(model.config.layers):
        if isinstance(layer, AttentionLayer) and layer.shares_kv_with is None:
            first.setdefault(layer, index)
    longest = max(layer.window or 0 for layer in first)
    tokens = 2 * multiple + padded_keys(longest, BLOCK_TOKENS)
    blocks = tokens // BLOCK_TOKENS
    cache = KVCache(model.config, blocks + 1, dtype, model.device, layers=max(first.values()) + 1)
    attention = PagedAttention(cache, model.rotaries)
    return all(_layer_equal(attention, model, index, tokens, multiple) for index in first.values())


def _layer_equal(attention: PagedAttention, model: Model, layer: int, tokens: int, multiple: int) -> bool:
    shape = attention.layers[layer].shape
    blocks = list(range(1, tokens // BLOCK_TOKENS + 1))
    scattered = blocks[::2] + blocks[1::2]
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, shape.parts, shape.head_dim, generator=generator)
    qkv = qkv.to(model.device, model.hidden_dtype)
    rows = [5, 63, multiple - 1, multiple, multiple + BLOCK_TOKENS + 1]
    if shape.window is not None:
        rows.append(
            multiple + shape.window + 3
        )  # some of the passes it comes in begin after `multiple`, others before
    for table in (blocks, scattered):
        for start in range(0, tokens, multiple):
            part = qkv[start : start + multiple]
            attention.prefill(table, start, len(part), len(part), multiple)(layer, part, None)
        for row in rows:
            expected = None
            for count, offset in ((64, 5), (64, 0), (8, 3), (16, 15), (48, 7), (208, 5), (256, 200)):
                start = row - offset
                if start < 0 or start + count > tokens:
                    continue
                attend = attention.prefill(table, start, count, count, multiple)
                got = attend(layer, qkv[start : start + count], None)[offset]
                expected = got if expected is None else expected
                if not torch.equal(got, expected):
                    return False
        if not _decode_equal(attention, layer, table, qkv, multiple):
            return False
    return True


def _decode_equal(attention: PagedAttention, layer: int, table: list[int], qkv: Tensor, multiple: int) -> bool:
    """One row alone equals the same row beside others, of its own length and of others."""
    for row in (5, multiple - 1, multiple + 3):
        expected = None
        for lengths in ([row], [row, row], [3, row, multiple + 9], [row] * 5):
            attend = attention.decode([table] * len(lengths), lengths, len(lengths), multiple)
            got = attend(layer, qkv[torch.tensor(lengths, device=qkv.device)], None)[lengths.index(row)]
            expected = got if expected is None else expected
            if not torch.equal(got, expected):
                return False
    return True


def _step_equal(model: Model, dtype: torch.dtype) -> bool:
    """Whether a whole step, where the model has one, gives a row the same bits alone and beside others."""
    cache = KVCache(model.config, 8, dtype, model.device)
    step = WholeStep.of(model, cache)
    if step is None:
        return True
    ids, tables, lengths = (
        torch.arange(7) % model.config.vocab_size,
        [[block] for block in range(1, 8)],
        list(range(7)),
    )
    together = step(ids, tables, lengths)
    return all(
        torch.equal(step(ids[i : i + 1], tables[i : i + 1], lengths[i : i + 1])[0], together[i]) for i in (0, 3, 6)
    )
