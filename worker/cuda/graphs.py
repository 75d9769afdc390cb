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

from worker.block_pool import ZERO_BLOCK

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


class _Results:
    """Best tokens of a step and their logits, as they come to the host."""

    def __init__(self, most: int) -> None:
        self.logits: Tensor | None = None
        self._pinned = torch.zeros(2, most, dtype=torch.int32).pin_memory()
        self._come: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, best: Tensor, logits: Tensor) -> Tensor:
        """Have them sent, once what is under way on the device has run."""
        self._pinned.copy_(best, non_blocking=True)
        self._come.record()
        self.logits = logits
        return logits

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for them."""
        assert self.logits is not None
        self._come.synchronize()
        rows, results = len(self.logits), self._pinned.numpy()
        return results[0, :rows].tolist(), results[1, :rows].view(np.float32).tolist()


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
        self._ranges = decode_ranges(max_tokens)
        # Row 0: token ids, row 1: positions, -1 for padding; of the results: best tokens and, as bits, their logits.
        self._inputs = Mirror(2, most, device=device)
        self._tables = Mirror(most, table_width, device=device)
        self._known: list[list[int]] = [[] for _ in range(most)]  # whose blocks each row of the tables holds
        self._sent: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Of the last two steps: the later one may be started before the earlier one's results have been read.
        self._results = [_Results(most), _Results(most)]
        self._lengths: list[int] = []  # of the last step
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs.there[1] = -1
        best_there = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._best_there = best_there

        def captured(batch: int, longest: int) -> Tensor:
            ids, positions = self._inputs.there[:, :batch]
            logits = step(ids, positions, self._tables.there[:batch], longest)
            best = logits.argmax(dim=-1, keepdim=True)
            best_there[0, :batch].copy_(best.flatten())
            best_there[1, :batch].copy_(logits.gather(1, best).flatten().view(torch.int32))
            # What the next step starts from if nothing else is sent.
            ids.copy_(best_there[0, :batch])
            positions.add_(positions >= 0)
            return logits

        for longest in reversed(self._ranges):  # the largest first: the others find room in what it took
            for batch in reversed(self._batches):
                self._graphs[batch, longest] = _capture(partial(captured, batch, longest), pool)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, token_ids: Sequence[int], tables: Sequence[list[int]], lengths: Sequence[int]) -> Tensor:
        """One step: token i goes to position lengths[i]. Float32 logits."""
        rows, batch = len(token_ids), self._batch(len(token_ids))
        self._sent.synchronize()  # the last step's inputs have been read
        inputs = self._inputs.here
        inputs[0, :rows] = token_ids
        inputs[1, :rows] = lengths
        inputs[:, rows:batch] = [[0], [-1]]
        self._inputs.send()
        self._send_tables(tables)
        self._sent.record()
        return self._replay(lengths)

    def follow(self, tables: Sequence[list[int]]) -> Tensor:
        """The step after the last one, of the same sequences, each with the token of its largest logit."""
        self._sent.synchronize()
        self._send_tables(tables)
        self._sent.record()
        return self._replay([length + 1 for length in self._lengths])

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]] | None:
        """The best token of each row and its logit, if these are of one of the last two steps. Waits for the step."""
        known = next((each for each in self._results if each.logits is logits), None)
        return None if known is None else known.read()

    def _batch(self, rows: int) -> int:
        return next(count for count in self._batches if count >= rows)

    def _replay(self, lengths: Sequence[int]) -> Tensor:
        self._lengths = list(lengths)
        longest = next(tokens for tokens in self._ranges if tokens > max(lengths))
        graph, logits = self._graphs[self._batch(len(lengths)), longest]
        graph.replay()
        self._results.reverse()
        return self._results[0].fetch(self._best_there, logits[: len(lengths)])

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
    """Short prefill passes. `step(token_ids, positions, table, span, longest)` is what is captured.

    Before it comes `copy(pair)`, of one block to another.
    """

    def __init__(
        self,
        step: PrefillStep,
        copy: Callable[[Tensor], None],
        counts: Sequence[int],
        max_tokens: int,
        table_width: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        self._ranges = prefill_ranges(max_tokens)
        most = max(counts)
        # Token ids, positions, start and number of rows, the block to copy and where to, blocks.
        self._inputs = Mirror(2 * most + 4 + table_width, device=device)
        self._table_at = 2 * most + 4
        self._most = most
        self._sent: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs.there[most : 2 * most] = -1
        span, pair = self._inputs.there[2 * most : self._table_at].chunk(2)
        table = self._inputs.there[self._table_at :].unsqueeze(0)

        def captured(count: int, longest: int) -> Tensor:
            there = self._inputs.there
            copy(pair)
            return step(there[:count], there[most : most + count], table, span, longest)

        for longest in reversed(self._ranges):
            for count in sorted(counts, reverse=True):
                self._graphs[count, longest] = _capture(partial(captured, count, longest), pool)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self,
        count: int,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        start: int,
        copied: tuple[int, int] = (ZERO_BLOCK, ZERO_BLOCK),
    ) -> Tensor:
        """Final hidden rows [count, hidden] of these tokens from `start` on; rows past them are padding.

        `copied`: a block, and the one it is copied to before.
        """
        rows = len(token_ids)
        longest = next(tokens for tokens in self._ranges if tokens >= start + rows)
        self._sent.synchronize()
        inputs, most = self._inputs.here, self._most
        inputs[:rows] = token_ids
        inputs[rows:count] = 0
        inputs[most : most + rows] = np.arange(start, start + rows)
        inputs[most + rows : most + count] = -1
        inputs[2 * most : self._table_at] = start, rows, *copied
        inputs[self._table_at : self._table_at + len(blocks)] = blocks
        self._inputs.send(slice(self._table_at + len(blocks)))
        self._sent.record()
        graph, hidden = self._graphs[count, longest]
        graph.replay()
        return hidden


def decode_ranges(max_tokens: int) -> list[int]:
    """The lengths that decode steps are captured for."""
    return _ranges(_SHORTEST_DECODE, 4, max_tokens)


def prefill_ranges(max_tokens: int) -> list[int]:
    """The lengths that prefill passes are captured for."""
    return _ranges(_SHORTEST_PREFILL, 2, max_tokens)


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
