"""Runs one pass: rows in, hidden rows or logits out. Every pass has one of the proved row counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.attention import PagedAttention
from worker.kv_cache import KVCache
from worker.models.interface import Model
from worker.row_check import HEAD_ROWS, RowCounts


class ModelRunner:
    """A model, its KV memory and the row counts it may run."""

    def __init__(self, model: Model, cache: KVCache, row_counts: RowCounts) -> None:
        self.model = model
        self.cache = cache
        self.row_counts = row_counts
        self._attention = PagedAttention(cache, model.rotaries)

    @property
    def max_prefill_rows(self) -> int:
        return max(self.row_counts.prefill)

    @property
    def max_decode_rows(self) -> int:
        return max(self.row_counts.decode)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], blocks: list[int], start: int) -> Tensor:
        """Compute `token_ids` at [start, start + len) of one sequence into its `blocks`.

        Returns the final hidden rows [count, hidden]; rows past the tokens are padding. The caller owns every block
        that covers the span alone.
        """
        rows = len(token_ids)
        count = _count_for(rows, self.row_counts.prefill)
        attend = self._attention.prefill(blocks, start, rows, count, self.row_counts.key_multiple)
        ids = torch.tensor([*token_ids, *[0] * (count - rows)], dtype=torch.int64, device=self.model.device)
        return self.model.forward(ids, attend)

    @torch.inference_mode()
    def head_row(self, hidden_row: Tensor) -> Tensor:
        """Float32 logits [vocab] of one hidden row [hidden], always computed in the same shape."""
        rows = torch.zeros(HEAD_ROWS, len(hidden_row), dtype=hidden_row.dtype, device=hidden_row.device)
        rows[0] = hidden_row
        return self.model.logits(rows)[0]

    @torch.inference_mode()
    def decode(self, token_ids: list[int], tables: list[list[int]], lengths: list[int]) -> Tensor:
        """One step: token i goes to position lengths[i] of sequence i. Float32 logits [len(token_ids), vocab]."""
        rows = len(token_ids)
        count = _count_for(rows, self.row_counts.decode)
        attend = self._attention.decode(tables, lengths, count, self.row_counts.key_multiple)
        ids = torch.tensor(token_ids + [0] * (count - rows), dtype=torch.int64, device=self.model.device)
        return self.model.logits(self.model.forward(ids, attend))[:rows]


def _count_for(rows: int, counts: tuple[int, ...]) -> int:
    """The smallest listed count that holds `rows`."""
    fitting = [count for count in counts if count >= rows]
    if not fitting:
        raise ValueError(f"{rows} rows are more than any listed count {counts}")
    return min(fitting)
