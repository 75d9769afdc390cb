"""Runs one pass: rows in, hidden rows or logits out. Every pass has one of the proved row counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.attention import PagedAttention
from worker.kv_cache import KVCache
from worker.models.interface import Model
from worker.recurrent import Capture, Recurrence, StatePool
from worker.row_check import HEAD_ROWS, RowCounts
from worker.sequences import Saved
from worker.steps import Copies, StateUse
from worker.whole_step import WholeStep


class ModelRunner:
    """A model, its memory and the row counts it may run. `states` are there where the model recurs."""

    shared_prefill_rows = 64
    """Rows of a prefill pass while others decode, so that their streams do not stutter."""
    state_chunk = 1
    """Token by token: a pass may end anywhere."""

    def __init__(
        self, model: Model, cache: KVCache, row_counts: RowCounts, states: StatePool | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self.states = states
        self.row_counts = row_counts
        self._attention = PagedAttention(cache, model.rotaries)
        self._whole_step = WholeStep.of(model, cache)

    @property
    def max_prefill_rows(self) -> int:
        return max(self.row_counts.prefill)

    @property
    def max_decode_rows(self) -> int:
        return max(self.row_counts.decode)

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Sequence[int],
        blocks: list[int],
        start: int,
        use: StateUse | None = None,
        copies: Copies = (),
    ) -> Tensor:
        """Compute `token_ids` at [start, start + len) of one sequence into its `blocks`.

        Returns the final hidden rows [count, hidden]; rows past the tokens are padding. The caller owns every block
        that covers the span alone, once `copies` have been made. Where the model recurs, `use` says which states are
        read and written; if this raises, none of those is a state any more.
        """
        for source, target in copies:
            self.cache.copy_block(source, target)
        rows = len(token_ids)
        count = _count_for(rows, self.row_counts.prefill)
        attend = self._attention.prefill(blocks, start, rows, count, self.row_counts.key_multiple)
        ids = torch.tensor([*token_ids, *[0] * (count - rows)], dtype=torch.int64, device=self.model.device)
        if self.states is None or use is None:
            return self.model.forward(ids, attend)
        if use.source is not None:
            self.states.copy(use.source, use.entry)
        captures = [Capture(*capture) for capture in use.captures]
        recur = Recurrence.prefill(self.states, use.entry, rows, captures)
        return self.model.forward(ids, attend, recur=recur)

    @torch.inference_mode()
    def head_row(self, hidden_row: Tensor) -> Tensor:
        """Float32 logits [vocab] of one hidden row [hidden], always computed in the same shape."""
        rows = torch.zeros(HEAD_ROWS, len(hidden_row), dtype=hidden_row.dtype, device=hidden_row.device)
        rows[0] = hidden_row
        return self.model.logits(rows)[0]

    @torch.inference_mode()
    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> Tensor:
        """One step: token i goes to position lengths[i] of sequence i. Float32 logits [len(token_ids), vocab].

        `entries`: the recurrent state of each sequence, where the model has one.
        """
        rows = len(token_ids)
        count = _count_for(rows, self.row_counts.decode)
        if self._whole_step is not None:
            return self._whole_step(torch.tensor(token_ids), tables, lengths)
        attend = self._attention.decode(tables, lengths, count, self.row_counts.key_multiple)
        ids = torch.tensor(token_ids + [0] * (count - rows), dtype=torch.int64, device=self.model.device)
        recur = None if self.states is None else Recurrence(self.states, entries)
        return self.model.logits(self.model.forward(ids, attend, recur=recur))[:rows]

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """The best token of each row of logits, and its logit."""
        best = logits.argmax(dim=-1, keepdim=True)
        return best.flatten().tolist(), logits.gather(1, best).flatten().tolist()

    def save(self, blocks: Sequence[int], entry: int | None) -> Saved:
        """Host copies of a sequence's blocks and recurrent state."""
        state = None if self.states is None or entry is None else self.states.save(entry)
        return Saved(self.cache.save(blocks), state)

    def load(self, blocks: Sequence[int], entry: int | None, saved: Saved) -> None:
        """Put what `save` returned back, into (other) blocks and another entry."""
        self.cache.load(blocks, saved.blocks)
        if self.states is not None and entry is not None and saved.state is not None:
            self.states.load(entry, saved.state)


def _count_for(rows: int, counts: tuple[int, ...]) -> int:
    """The smallest listed count that holds `rows`."""
    fitting = [count for count in counts if count >= rows]
    if not fitting:
        raise ValueError(f"{rows} rows are more than any listed count {counts}")
    return min(fitting)
