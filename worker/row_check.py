"""Which row counts give a row the same bits, found out on this machine at start (design, Exactness 1 to 3).

A hit is bit-identical to a cold run only if a row's result does not depend on how many rows, or which, were computed
with it. Libraries do not promise that, so each listed count is compared with the reference count here, over one layer
of the real weights, the head, and attention at several alignments. A count that fails leaves the list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention import KEY_MULTIPLE, PrefillAttention, decode_attention
from worker.heads import HeadNorms, split_heads
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.models.llama import LlamaModel

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


def check_rows(model: LlamaModel, kv_dtype: torch.dtype, max_positions: int, deterministic: bool) -> RowCounts:
    """Compare all listed counts on the loaded model. `deterministic` keeps only proved counts for decode."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(LISTED_ROWS),), generator=generator).to(model.device)
    prefill = tuple(c for c in _equal_counts(model, ids, REFERENCE_ROWS) if c >= MIN_PREFILL_ROWS)
    # Decode may run another kernel than prefill does: its counts need to be equal among themselves.
    fewest = min(LISTED_ROWS)
    few = ids[:DECODE_ROWS]
    decode = tuple(c for c in _equal_counts(model, few, fewest) if _head_equal(model, few, c, fewest))
    multiple, exact = _key_multiple(model, kv_dtype, max_positions)
    if not deterministic:
        decode = tuple(count for count in LISTED_ROWS if count <= DECODE_ROWS)
    result = RowCounts(prefill or (REFERENCE_ROWS,), decode or (fewest,), multiple, deterministic, exact)
    log.info("row check: %s", result)
    if not exact:
        log.error("row check failed for attention: hits may differ from cold runs in the last bits")
    return result


def _equal_counts(model: LlamaModel, ids: Tensor, reference: int) -> list[int]:
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


def _head_equal(model: LlamaModel, ids: Tensor, count: int, reference: int) -> bool:
    """Whether `count` rows give the head's bits of `reference` rows; only the ends are compared, as it is large."""
    rows = model.embedding[ids[:count]].to(model.hidden_dtype)
    found = model.logits(rows)
    return torch.equal(found[:reference], model.logits(rows[:reference])) and torch.equal(
        found[-reference:], model.logits(rows[-reference:])
    )


def _dense_rows(model: LlamaModel, ids: Tensor) -> Tensor:
    """Everything in one layer but attention, whose place the queries themselves take."""
    heads = model.config.num_heads
    cos, sin = model.rotary.rows(ids % 7)

    def attend(_layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        q, _, _ = split_heads(qkv, model.config.num_kv_heads, norms, cos, sin)
        return q[:, :heads].flatten(1)

    return model.forward(ids, attend, num_layers=1)


def _key_multiple(model: LlamaModel, dtype: torch.dtype, max_positions: int) -> tuple[int, bool]:
    """The smallest key multiple from `KEY_MULTIPLE` on at which attention rows are equal."""
    multiple = KEY_MULTIPLE
    while not _attention_equal(model, dtype, multiple):
        if multiple >= max_positions:
            return multiple, False
        multiple *= 2
    return multiple, True


def _attention_equal(model: LlamaModel, dtype: torch.dtype, multiple: int) -> bool:
    config = model.config
    tokens = 2 * multiple
    blocks = list(range(1, tokens // BLOCK_TOKENS + 1))
    scattered = blocks[::2] + blocks[1::2]
    generator = torch.Generator().manual_seed(1)

    parts = config.num_heads + 2 * config.num_kv_heads
    qkv = torch.randn(tokens, parts, config.head_dim, generator=generator).to(model.device, model.hidden_dtype)
    cache = KVCache(config, len(blocks) + 1, dtype, model.device, layers=1)
    for table in (blocks, scattered):
        PrefillAttention(cache, model.rotary, table, 0, tokens, tokens, multiple)(0, qkv, None)
        for row in (5, 63, multiple - 1, multiple, multiple + BLOCK_TOKENS + 1):
            expected = None
            for count, offset in ((64, 5), (64, 0), (8, 3), (16, 15), (48, 7), (208, 5), (256, 200)):
                start = row - offset
                if start < 0 or start + count > tokens:
                    continue
                attend = PrefillAttention(cache, model.rotary, table, start, count, count, multiple)
                got = attend(0, qkv[start : start + count], None)[offset]
                expected = got if expected is None else expected
                if not torch.equal(got, expected):
                    return False
        if not _decode_equal(model, cache, table, qkv, multiple):
            return False
    return True


def _decode_equal(model: LlamaModel, cache: KVCache, table: list[int], qkv: Tensor, multiple: int) -> bool:
    """One row alone equals the same row beside others, of its own length and of others."""
    for row in (5, multiple - 1, multiple + 3):
        expected = None
        for lengths in ([row], [row, row], [3, row, multiple + 9], [row] * 5):
            attend = decode_attention(cache, model.rotary, [table] * len(lengths), lengths, len(lengths), multiple)
            got = attend(0, qkv[torch.tensor(lengths, device=qkv.device)], None)[lengths.index(row)]
            expected = got if expected is None else expected
            if not torch.equal(got, expected):
                return False
    return True
