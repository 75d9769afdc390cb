"""Runs the passes of models whose layers differ: some recur, some see a window, some read another's keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.cuda.chunk_plan import CHUNK, ChunkPlan, plan_size
from worker.cuda.graphs import Mirror
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_ops import MixedOps, States
from worker.cuda.ops import Places
from worker.cuda.runner import CudaRunner
from worker.cuda.sliding import SlidingModel
from worker.cuda.tiles import DECODE_BATCHES
from worker.kv_cache import KVCache
from worker.model_shape import AttentionLayer, Rope
from worker.recurrent import StatePool
from worker.sequences import Saved
from worker.steps import Copies, StateUse

MixedModel = HybridModel | SlidingModel

_CAPTURED_ROWS = 1024  # layers take more kernels than dense ones: launched one by one, 640 rows took 19 ms
_SPARE_CHUNKS = 16  # boundaries within a captured pass, about: one with more is run launch by launch
_CAPTURED_CHUNKS = _CAPTURED_ROWS // CHUNK + _SPARE_CHUNKS


class MixedRunner(CudaRunner):
    """As `CudaRunner`; `states` are there where the model recurs. A restored state is read where it lies."""

    captured_rows = _CAPTURED_ROWS

    def __init__(
        self,
        model: MixedModel,
        cache: KVCache,
        ops: MixedOps,
        prefill_rows: tuple[int, ...],
        states: StatePool | None,
        capture: bool = True,
    ) -> None:
        self.states = states
        self.state_chunk = 1 if states is None else CHUNK
        self._model = model
        self._mixed_ops = ops
        self._replays = True  # whether the plan of the pass at hand fits a captured one
        device = model.device
        self._plan = torch.zeros(plan_size(_CAPTURED_CHUNKS), dtype=torch.int32, device=device)
        self._capacity = _CAPTURED_CHUNKS
        self._entries = torch.zeros(max(DECODE_BATCHES), dtype=torch.int32, device=device)
        if device.type == "cuda":
            self._sent: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._static_plan = Mirror(len(self._plan), device=device)
            self._static_entries = Mirror(len(self._entries), device=device)
            self._plan, self._entries = self._static_plan.there, self._static_entries.there
        super().__init__(model, cache, ops, prefill_rows, capture)

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Sequence[int],
        blocks: list[int],
        start: int,
        use: StateUse | None = None,
        copies: Copies = (),
    ) -> Tensor:
        """As `CudaRunner.prefill`. If this raises, none of the states in `use` is one any more."""
        if self.states is None:
            return super().prefill(token_ids, blocks, start, copies=copies)
        assert use is not None, "a pass that says nothing of states would move some on"
        plan = ChunkPlan.of(len(token_ids), use)
        self._replays = plan.chunks <= _CAPTURED_CHUNKS
        if self._prefill_graphs is not None and self._is_captured(self._count_for(len(token_ids))):
            self._sent.synchronize()  # the last plan has been sent from where this one is written
            plan.pack(_CAPTURED_CHUNKS, self._static_plan.here)
            self._static_plan.send()
            self._sent.record()
        else:
            packed = np.zeros(plan_size(plan.chunks), np.int32)
            plan.pack(plan.chunks, packed)
            self._plan, self._capacity = self._to_device(packed), plan.chunks
        hidden = super().prefill(token_ids, blocks, start, copies=copies)
        for source, target in plan.copies:
            self.states.copy(source, target)
        return hidden

    @torch.inference_mode()
    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> Tensor:
        """As `CudaRunner.decode`; `entries` are the recurrent states of the sequences, where the model has any."""
        if self.states is None:
            return super().decode(token_ids, tables, lengths)
        if self._decode_graphs is not None:
            self._sent.synchronize()
            self._static_entries.here[: len(entries)] = entries
            self._static_entries.send()
            self._sent.record()
        else:
            self._entries = self._to_device(np.array(entries, np.int32))
        return super().decode(token_ids, tables, lengths)

    def save(self, blocks: Sequence[int], entry: int | None) -> Saved:
        """Host copies of a sequence's blocks and recurrent state."""
        state = None if self.states is None or entry is None else self.states.save(entry)
        return Saved(self.cache.save(blocks), state)

    def load(self, blocks: Sequence[int], entry: int | None, saved: Saved) -> None:
        """Put what `save` returned back, into (other) blocks and another entry."""
        super().load(blocks, entry, saved)
        if self.states is not None and entry is not None and saved.state is not None:
            self.states.load(entry, saved.state)

    def _layer_pools(self, cache: KVCache) -> list[Tensor]:
        """The pool that each attention layer reads, in their order."""
        layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, AttentionLayer)}
        return [cache.pool(index) for index in layers]

    def _is_captured(self, count: int) -> bool:
        return self._replays and super()._is_captured(count)

    def _prefill(self, token_ids: Tensor, positions: Tensor, tables: Tensor, span: Tensor, longest: int) -> Tensor:
        places = self._places(positions, tables, span)
        states = None if self.states is None else States(self.states.memory, self._plan, self._capacity)
        return self._model.prefill(token_ids, self._mixed_ops, places, self._pools, longest, self._few, states)

    def _decode(self, token_ids: Tensor, positions: Tensor, tables: Tensor, longest: int) -> Tensor:
        places = self._places(positions, tables, positions)
        entries = self._entries[: len(token_ids)]
        states = None if self.states is None else States(self.states.memory, entries)
        return self._model.decode(token_ids, self._mixed_ops, places, self._pools, longest, states)

    def _places(self, positions: Tensor, tables: Tensor, span: Tensor) -> dict[Rope, Places]:
        at = positions.long()
        return {
            rope: Places(positions, tables, *rotary.rows(at), span) for rope, rotary in self.model.rotaries.items()
        }
