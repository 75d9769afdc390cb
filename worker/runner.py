"""What the engine asks of whatever runs the model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from worker.kv_cache import KVCache
from worker.row_check import RowCounts
from worker.sequences import Saved
from worker.steps import Copies, StateUse


class Runner(Protocol):
    """A model, its memory and the row counts it may run."""

    cache: KVCache
    row_counts: RowCounts
    shared_prefill_rows: int
    """Rows of a prefill pass while others decode."""
    state_chunk: int
    """A prefill pass ends so many tokens, or a multiple of it, behind a boundary, or where the prompt does."""

    @property
    def max_prefill_rows(self) -> int:
        """Tokens that one prefill pass takes at most."""

    @property
    def max_decode_rows(self) -> int:
        """Sequences that one decode step takes at most."""

    def prefill(
        self,
        token_ids: Sequence[int],
        blocks: list[int],
        start: int,
        use: StateUse | None = None,
        copies: Copies = (),
    ) -> Tensor:
        """Hidden rows of tokens at [start, start + len) of one sequence, valid until the next pass.

        `copies` are made before: blocks that the sequence writes on in, and others still read.
        """

    def head_row(self, hidden_row: Tensor) -> Tensor:
        """Float32 logits [vocab] of one hidden row."""

    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> Tensor:
        """Float32 logits [rows, vocab] of the next token of each sequence, valid until the next step."""

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """The best token of each row of logits, and its logit."""

    def save(self, blocks: Sequence[int], entry: int | None) -> Saved:
        """Host copies of a sequence's blocks and recurrent state."""

    def load(self, blocks: Sequence[int], entry: int | None, saved: Saved) -> None:
        """Put what `save` returned back, into (other) blocks and another entry."""
