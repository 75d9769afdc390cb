"""Runs the passes of a dense model on a CUDA device, with the interface of `worker.model_runner.ModelRunner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.cuda.decoder import CudaDecoder
from worker.cuda.dense import DenseModel
from worker.cuda.graphs import DecodeGraphs, PrefillGraphs
from worker.cuda.ops import Ops, Places
from worker.cuda.tiles import DECODE_BATCHES, GRAPH_PREFILL_ROWS, SHARED_PREFILL_ROWS
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.row_check import RowCounts
from worker.sequences import Saved
from worker.steps import Copies, StateUse

log = logging.getLogger(__name__)

_TABLE_MULTIPLE = 8  # blocks: tables are read in whole tiles of keys, the longest of which has 256


class CudaRunner:
    """A model, its KV memory, the operations it runs on and the row counts that prefill's products may have.

    On a CUDA device decode steps and short prefill passes are captured graphs; elsewhere nothing is.
    """

    shared_prefill_rows = SHARED_PREFILL_ROWS
    """Rows of a prefill pass while others decode."""
    state_chunk = 1
    """Nothing recurs: a pass may end anywhere."""
    captured_rows = GRAPH_PREFILL_ROWS
    """Prefill passes of up to so many rows are replayed."""

    def __init__(
        self,
        model: CudaDecoder[Any],
        cache: KVCache,
        ops: Ops,
        prefill_rows: tuple[int, ...],
        capture: bool = True,
    ) -> None:
        """`capture`: make the graphs now; without them every pass is run launch by launch."""
        self.model = model
        self.cache = cache
        cache.copier = ops.copy_block
        cache.copy_block(0, 0)  # what is compiled for it is there before a request needs it
        # Decode is the same for every batch by construction: each row is walked in one order, alone.
        padded = tuple(sorted((*product, rows) for product, rows in ops.padded.items()))
        self.row_counts = RowCounts(prefill_rows, DECODE_BATCHES, BLOCK_TOKENS, True, True, padded)
        self._ops = ops
        self._pools = self._layer_pools(cache)
        widest = max(pool[0, 0].numel() for pool in self._pools)
        assert widest < 1 << 31, "kernels count places within a head's pool in 32 bits"
        self._width = _padded(-(-model.max_positions // BLOCK_TOKENS))
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._few = min(prefill_rows)
        self._captured = [count for count in prefill_rows if count <= self.captured_rows]
        if capture and model.device.type == "cuda":
            self._capture(model.max_positions)

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

        Returns rows [count, hidden], valid until the next pass: that of the last token is its final hidden row, the
        others may be anything.
        The caller owns every block that covers the span alone, once `copies` have been made. `use` is for models that
        recur: these do not.
        """
        rows = len(token_ids)
        count = self._count_for(rows)
        table = blocks[: -(-(start + rows) // BLOCK_TOKENS)]
        if self._prefill_graphs is not None and self._is_captured(count) and len(copies) <= 1:
            return self._prefill_graphs.run(count, token_ids, table, start, *copies)
        for source, target in copies:
            self.cache.copy_block(source, target)
        packed = np.zeros(count + 4 + _padded(len(table)), dtype=np.int32)
        packed[:rows] = token_ids
        packed[count : count + 2] = start, rows
        packed[count + 4 : count + 4 + len(table)] = table
        there = self._to_device(packed)
        positions = torch.arange(start, start + rows, dtype=torch.int32, device=self.model.device)
        tables, span = there[count + 4 :].unsqueeze(0), there[count : count + 2]
        return self._prefill(there[:count], positions, tables, span, start + rows)

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
        if self._decode_graphs is not None:
            return self._decode_graphs.run(token_ids, tables, lengths)
        table = np.zeros((len(tables), self._width), dtype=np.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        ids, positions = self._to_device(np.array([token_ids, lengths], dtype=np.int32))
        return self._decode(ids, positions, self._to_device(table), max(lengths) + 1)

    @torch.inference_mode()
    def follow(self, tables: list[list[int]]) -> Tensor | None:
        """Start the step after the last decode step, of the same sequences, with their most likely tokens.

        None without a captured step: nothing was done.
        """
        return None if self._decode_graphs is None else self._decode_graphs.follow(tables)

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """The best token of each row of logits and its logit; known already for those of the last decode step."""
        known = None if self._decode_graphs is None else self._decode_graphs.largest(logits)
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

    def _count_for(self, rows: int) -> int:
        """The rows that a prefill pass of so many tokens runs at."""
        return min(count for count in self.row_counts.prefill if count >= rows)

    def _layer_pools(self, cache: KVCache) -> list[Tensor]:
        """What the model's passes take as pools."""
        (memory,) = cache.memories  # all layers are alike
        return list(memory.unbind(0))

    def _is_captured(self, count: int) -> bool:
        """Whether a prefill pass of `count` rows can be replayed."""
        return count in self._captured

    def _capture(self, max_tokens: int) -> None:
        started, device, pool = time.monotonic(), self.model.device, torch.cuda.graph_pool_handle()
        self._decode_graphs = DecodeGraphs(self._decode, DECODE_BATCHES, max_tokens, self._width, device, pool)
        graphs = len(self._decode_graphs)
        if self._captured:
            self._prefill_graphs = PrefillGraphs(
                self._prefill, self._copy_named, self._captured, max_tokens, self._width, device, pool
            )
            graphs += len(self._prefill_graphs)
        log.info("captured %d graphs in %.1f s", graphs, time.monotonic() - started)

    def _copy_named(self, pair: Tensor) -> None:
        for memory in self.cache.memories:
            self._ops.copy_named_block(memory, pair)

    def _prefill(self, token_ids: Tensor, positions: Tensor, tables: Tensor, span: Tensor, longest: int) -> Tensor:
        assert isinstance(self.model, DenseModel)
        places = Places(positions, tables, *self.model.rotary.rows(positions.long()), span)
        return self.model.prefill(token_ids, self._ops, places, self._pools, longest, self._few)

    def _decode(self, token_ids: Tensor, positions: Tensor, tables: Tensor, longest: int) -> Tensor:
        assert isinstance(self.model, DenseModel)
        places = Places(positions, tables, *self.model.rotary.rows(positions.long()), positions)
        return self.model.decode(token_ids, self._ops, places, self._pools, longest)

    def _to_device(self, array: NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.model.device, non_blocking=True)


def _padded(blocks: int) -> int:
    return -(-blocks // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
