"""Passes as CUDA graphs, replayed on static inputs: the host starts hundreds of kernels by one call.

There is a graph for each number of rows and each range of lengths. All share one pool of memory, so results hold only
until the next pass of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

DecodeStep = Callable[[Tensor, Tensor, Tensor, int], Tensor]
PrefillStep = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
_SHORTEST_DECODE, _SHORTEST_PREFILL = 512, 4096  # tokens of the first range of lengths


class Mirror:
    """An int32 tensor on the device and the host's pinned copy of it, which must not change while it is sent."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.there = torch.zeros(shape, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(shape, dtype=torch.int32).pin_memory()
        self.here = self._pinned.numpy()

    def send(self, rows: slice = slice(None)) -> None:
        self.there[rows].copy_(self._pinned[rows], non_blocking=True)

    def fetch(self) -> None:
        self._pinned.copy_(self.there, non_blocking=True)


class DecodeGraphs:
    """Decode steps. `step(token_ids, positions, tables, longest)` is what is captured."""

    def __init__(
        self,
        step: DecodeStep,
        batches: Sequence[int],
        max_tokens: int,
        table_width: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        most = max(batches)
        self._batches = sorted(batches)
        self._ranges = _ranges(_SHORTEST_DECODE, 4, max_tokens)
        # Row 0: token ids, row 1: positions, -1 for padding; of the results: best tokens and, as bits, their logits.
        self._inputs = Mirror(2, most, device=device)
        self._results = Mirror(2, most, device=device)
        self._tables = Mirror(most, table_width, device=device)
        self._known: list[list[int]] = [[] for _ in range(most)]  # whose blocks each row of the tables holds
        self._done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._logits: Tensor | None = None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs.there[1] = -1

        def captured(batch: int, longest: int) -> Tensor:
            ids, positions = self._inputs.there[:, :batch]
            logits = step(ids, positions, self._tables.there[:batch], longest)
            best = logits.argmax(dim=-1, keepdim=True)
            self._results.there[0, :batch].copy_(best.flatten())
            self._results.there[1, :batch].copy_(logits.gather(1, best).flatten().view(torch.int32))
            return logits

        for longest in reversed(self._ranges):  # the largest first: the others find room in what it took
            for batch in reversed(self._batches):
                self._graphs[batch, longest] = _capture(partial(captured, batch, longest), pool)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, token_ids: Sequence[int], tables: Sequence[list[int]], lengths: Sequence[int]) -> Tensor:
        """One step: token i goes to position lengths[i]. Float32 logits."""
        rows = len(token_ids)
        batch = next(count for count in self._batches if count >= rows)
        longest = next(tokens for tokens in self._ranges if tokens > max(lengths))
        self._done.synchronize()  # the last step has read what is written here
        inputs = self._inputs.here
        inputs[0, :rows] = token_ids
        inputs[1, :rows] = lengths
        inputs[:, rows:batch] = [[0], [-1]]
        self._inputs.send()
        self._send_tables(tables)
        graph, logits = self._graphs[batch, longest]
        graph.replay()
        self._results.fetch()
        self._done.record()
        self._logits = logits[:rows]
        return self._logits

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]] | None:
        """The best token of each row and its logit, if these are the last step's. Waits for the step."""
        if logits is not self._logits:
            return None
        self._done.synchronize()
        rows, results = len(logits), self._results.here
        return results[0, :rows].tolist(), results[1, :rows].view(np.float32).tolist()

    def _send_tables(self, tables: Sequence[list[int]]) -> None:
        """Bring the rows whose blocks are others than in the last step to the device."""
        changed = [row for row, blocks in enumerate(tables) if self._known[row] != blocks]
        for row in changed:
            blocks = tables[row]
            self._tables.here[row, : len(blocks)] = blocks
            self._known[row] = list(blocks)
        if changed:
            self._tables.send(slice(changed[0], changed[-1] + 1))


class PrefillGraphs:
    """Short prefill passes. `step(token_ids, positions, table, span, longest)` is what is captured."""

    def __init__(
        self,
        step: PrefillStep,
        counts: Sequence[int],
        max_tokens: int,
        table_width: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        self._ranges = _ranges(_SHORTEST_PREFILL, 2, max_tokens)
        most = max(counts)
        # Token ids, positions, start and number of rows (to a multiple of 16 bytes), blocks.
        self._inputs = Mirror(2 * most + 4 + table_width, device=device)
        self._table_at = 2 * most + 4
        self._most = most
        self._sent: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs.there[most : 2 * most] = -1
        span = self._inputs.there[2 * most : 2 * most + 2]
        table = self._inputs.there[self._table_at :].unsqueeze(0)

        def captured(count: int, longest: int) -> Tensor:
            there = self._inputs.there
            return step(there[:count], there[most : most + count], table, span, longest)

        for longest in reversed(self._ranges):
            for count in sorted(counts, reverse=True):
                self._graphs[count, longest] = _capture(partial(captured, count, longest), pool)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, count: int, token_ids: Sequence[int], blocks: Sequence[int], start: int) -> Tensor:
        """Final hidden rows [count, hidden] of these tokens from `start` on; rows past them are padding."""
        rows = len(token_ids)
        longest = next(tokens for tokens in self._ranges if tokens >= start + rows)
        self._sent.synchronize()
        inputs, most = self._inputs.here, self._most
        inputs[:rows] = token_ids
        inputs[rows:count] = 0
        inputs[most : most + rows] = np.arange(start, start + rows)
        inputs[most + rows : most + count] = -1
        inputs[2 * most : 2 * most + 2] = start, rows
        inputs[self._table_at : self._table_at + len(blocks)] = blocks
        self._inputs.send(slice(self._table_at + len(blocks)))
        self._sent.record()
        graph, hidden = self._graphs[count, longest]
        graph.replay()
        return hidden


def _ranges(first: int, factor: int, last: int) -> list[int]:
    """Bounds of lengths up to `last`, each `factor` times the one before."""
    ranges = [first]
    while ranges[-1] < last:
        ranges.append(min(factor * ranges[-1], last))
    return ranges


@torch.inference_mode()
def _capture(run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out
