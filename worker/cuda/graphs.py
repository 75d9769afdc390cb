"""Decode steps as CUDA graphs: one for each number of rows and each range of lengths, replayed on static inputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

_SHORTEST = 512  # tokens of the first range of lengths; each next one is four times as long
Step = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class DecodeGraphs:
    """All graphs of one model. A step's logits lie in static memory: they hold until the next step.

    `step(token_ids, positions, tables, longest)` is what is captured; `longest` bounds the lengths it is for.
    """

    def __init__(
        self, step: Step, batches: Sequence[int], max_tokens: int, table_width: int, device: torch.device
    ) -> None:
        started = time.monotonic()
        most = max(batches)
        self._batches = sorted(batches)
        self._ranges = [_SHORTEST]
        while self._ranges[-1] < max_tokens:
            self._ranges.append(min(4 * self._ranges[-1], max_tokens))
        # Row 0: token ids, row 1: positions, -1 for padding; of the results: best tokens and, as bits, their logits.
        self._inputs = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, table_width, dtype=torch.int32, device=device)
        self._results = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._host_inputs = torch.zeros(2, most, dtype=torch.int32).pin_memory()
        self._host_tables = torch.zeros(most, table_width, dtype=torch.int32).pin_memory()
        self._host_results = torch.zeros(2, most, dtype=torch.int32).pin_memory()
        self._known: list[list[int]] = [[] for _ in range(most)]  # whose blocks each row of the tables holds
        self._done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._logits: Tensor | None = None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._capture(step)
        log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.monotonic() - started)

    def run(self, token_ids: Sequence[int], tables: Sequence[list[int]], lengths: Sequence[int]) -> Tensor:
        """One step: token i goes to position lengths[i]. Float32 logits, valid until the next call."""
        rows = len(token_ids)
        batch = next(count for count in self._batches if count >= rows)
        longest = next(tokens for tokens in self._ranges if tokens > max(lengths))
        self._done.synchronize()  # the last step has read what is written here
        inputs = self._host_inputs.numpy()
        inputs[0, :rows] = token_ids
        inputs[1, :rows] = lengths
        inputs[:, rows:batch] = [[0], [-1]]
        self._inputs.copy_(self._host_inputs, non_blocking=True)
        self._send_tables(tables)
        graph, logits = self._graphs[batch, longest]
        graph.replay()
        self._host_results.copy_(self._results, non_blocking=True)
        self._done.record()
        self._logits = logits[:rows]
        return self._logits

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]] | None:
        """The best token of each row and its logit, if these are the last step's. Waits for the step."""
        if logits is not self._logits:
            return None
        self._done.synchronize()
        rows, results = len(logits), self._host_results.numpy()
        return results[0, :rows].tolist(), results[1, :rows].view(np.float32).tolist()

    def _send_tables(self, tables: Sequence[list[int]]) -> None:
        """Bring the rows whose blocks are others than in the last step to the device."""
        host = self._host_tables.numpy()
        changed = [row for row, blocks in enumerate(tables) if self._known[row] != blocks]
        for row in changed:
            blocks = tables[row]
            host[row, : len(blocks)] = blocks
            self._known[row] = list(blocks)
        if changed:
            span = slice(changed[0], changed[-1] + 1)
            self._tables[span].copy_(self._host_tables[span], non_blocking=True)

    @torch.inference_mode()
    def _capture(self, step: Step) -> None:
        """Capture the largest first: the others find room in the memory that it took."""
        pool = torch.cuda.graph_pool_handle()
        self._inputs[1] = -1
        for longest in reversed(self._ranges):
            for batch in reversed(self._batches):
                graph = torch.cuda.CUDAGraph()
                step(self._inputs[0, :batch], self._inputs[1, :batch], self._tables[:batch], longest)  # compiles
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=pool):
                    logits = step(self._inputs[0, :batch], self._inputs[1, :batch], self._tables[:batch], longest)
                    best = logits.argmax(dim=-1, keepdim=True)
                    self._results[0, :batch].copy_(best.flatten())
                    self._results[1, :batch].copy_(logits.gather(1, best).flatten().view(torch.int32))
                self._graphs[batch, longest] = graph, logits
