"""Runs the passes of a dense model on a CUDA device, with the interface of `worker.model_runner.ModelRunner`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.cuda.dense import DenseModel
from worker.cuda.graphs import DecodeGraphs
from worker.cuda.ops import Ops, Places
from worker.cuda.tiles import DECODE_BATCHES
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.row_check import RowCounts
from worker.sequences import Saved
from worker.steps import StateUse

_TABLE_MULTIPLE = 8  # blocks: tables are read in whole tiles of keys, the longest of which has 256


class CudaRunner:
    """A model, its KV memory, the operations it runs on and the row counts that prefill's products may have.

    Decode runs as captured graphs on a CUDA device, and step by step elsewhere.
    """

    def __init__(self, model: DenseModel, cache: KVCache, ops: Ops, prefill_rows: tuple[int, ...]) -> None:
        self.model = model
        self.cache = cache
        # Decode is the same for every batch by construction: each row is walked in one order, alone.
        self.row_counts = RowCounts(prefill_rows, DECODE_BATCHES, BLOCK_TOKENS, batch_invariant=True, exact=True)
        self._ops = ops
        (memory,) = cache.memories  # all layers are alike
        self._pools = list(memory.unbind(0))
        self._width = _padded(-(-model.max_positions // BLOCK_TOKENS))
        self._graphs: DecodeGraphs | None = None
        if model.device.type == "cuda":
            self._graphs = DecodeGraphs(self._step, DECODE_BATCHES, model.max_positions, self._width, model.device)

    @property
    def max_prefill_rows(self) -> int:
        return max(self.row_counts.prefill)

    @property
    def max_decode_rows(self) -> int:
        return max(self.row_counts.decode)

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], blocks: list[int], start: int, use: StateUse | None = None
    ) -> Tensor:
        """Compute `token_ids` at [start, start + len) of one sequence into its `blocks`.

        Returns the final hidden rows [count, hidden]; rows past the tokens are padding. The caller owns every block
        that covers the span alone. `use` is for models that recur: these do not.
        """
        rows = len(token_ids)
        count = min(count for count in self.row_counts.prefill if count >= rows)
        table = blocks[: -(-(start + rows) // BLOCK_TOKENS)]
        packed = np.zeros(count + _padded(len(table)), dtype=np.int32)
        packed[:rows] = token_ids
        packed[count : count + len(table)] = table
        packed_ids = self._to_device(packed)
        ids, tables = packed_ids[:count], packed_ids[count:]
        positions = torch.arange(start, start + rows, dtype=torch.int32, device=self.model.device)
        places = Places(positions, tables.unsqueeze(0), *self.model.rotary.rows(positions.long()))
        return self.model.prefill(ids, self._ops, places, self._pools, start)

    @torch.inference_mode()
    def head_row(self, hidden_row: Tensor) -> Tensor:
        """Float32 logits [vocab] of one hidden row [hidden], always computed in the same shape."""
        return self.model.few_logits(hidden_row.unsqueeze(0), self._ops)[0]

    @torch.inference_mode()
    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> Tensor:
        """One step: token i goes to position lengths[i] of sequence i. Float32 logits [len(token_ids), vocab].

        They are valid until the next step. `entries` are for models that recur: these do not.
        """
        if self._graphs is not None:
            return self._graphs.run(token_ids, tables, lengths)
        table = np.zeros((len(tables), self._width), dtype=np.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        ids, positions = self._to_device(np.array([token_ids, lengths], dtype=np.int32))
        return self._step(ids, positions, self._to_device(table), max(lengths) + 1)

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """The best token of each row of logits and its logit; known already for those of the last decode step."""
        known = None if self._graphs is None else self._graphs.largest(logits)
        if known is not None:
            return known
        most, best = logits.max(dim=-1)
        return best.tolist(), most.tolist()

    def save(self, blocks: Sequence[int], entry: int | None) -> Saved:
        """Host copies of a sequence's blocks."""
        return Saved(self.cache.save(blocks), None)

    def load(self, blocks: Sequence[int], entry: int | None, saved: Saved) -> None:
        """Put what `save` returned back, into (other) blocks."""
        self.cache.load(blocks, saved.blocks)

    def _step(self, token_ids: Tensor, positions: Tensor, tables: Tensor, longest: int) -> Tensor:
        factors = self.model.rotary.rows(positions.long())
        return self.model.decode(token_ids, self._ops, Places(positions, tables, *factors), self._pools, longest)

    def _to_device(self, array: NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.model.device, non_blocking=True)


def _padded(blocks: int) -> int:
    return -(-blocks // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
