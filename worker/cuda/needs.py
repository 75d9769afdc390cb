"""How much memory of a card the passes of a model need beside weights, keys and values: tried beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from protocol.sizes import format_size
from worker.cuda.graphs import decode_ranges, prefill_ranges
from worker.cuda.runner import CudaRunner
from worker.cuda.tiles import DECODE_BATCHES, PREFILL_SPLIT
from worker.kv_cache import BLOCK_TOKENS
from worker.steps import StateUse

log = logging.getLogger(__name__)

# What the allocator cannot put together again between passes of many sizes, and what graphs and libraries hold of the
# driver (0.5 GiB were seen with 55 graphs of an 8B model); and room to draw tokens in.
_LOOSE, _HELD_BYTES = 1.25, 3 << 29


def bytes_needed(runner: CudaRunner, recurs: bool) -> int:
    """Runs the largest passes of `runner`, which has captured nothing and whose pool holds nothing yet."""
    longest, use = runner.model.max_positions, StateUse(1, None, ()) if recurs else None
    rows = min(runner.max_prefill_rows, longest)
    start = min(longest - rows, 2 * PREFILL_SPLIT)
    batch = max(DECODE_BATCHES)
    entries = [1] * batch if recurs else []
    table = [0] * -(-longest // BLOCK_TOKENS)  # the zero block: what it holds is of no account here
    prefill = _peak(lambda: runner.prefill([0] * rows, table, start, use))
    decode = _peak(lambda: runner.decode([0] * batch, [table] * batch, [longest - 1] * batch, entries))
    results = _result_bytes(runner, longest)
    torch.cuda.empty_cache()
    total = int(_LOOSE * prefill) + decode + results + _HELD_BYTES
    log.info(
        "kept free for passes: %s (%s in prefill, %s in decode, %s of results of graphs)",
        format_size(total),
        format_size(prefill),
        format_size(decode),
        format_size(results),
    )
    return total


def _result_bytes(runner: CudaRunner, longest: int) -> int:
    """Graphs share the memory that they work in, but each keeps its results."""
    config, captured = runner.model.config, [c for c in runner.row_counts.prefill if c <= runner.captured_rows]
    logits = 4 * config.vocab_size * sum(DECODE_BATCHES) * len(decode_ranges(longest))
    hidden = runner.model.dtype.itemsize * config.hidden_size * sum(captured) * len(prefill_ranges(longest))
    return logits + hidden


def _peak(run: Callable[[], object]) -> int:
    """The most that is allocated while it runs, beside what is before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
