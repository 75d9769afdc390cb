"""A tiny model in float32 behind the real runner and pool: all logits of prompts, and of sequences that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dense_caller import CPU, error, load, reference_logits, some_ids
from torch import Tensor

from worker.kv_cache import KVCache
from worker.model_runner import ModelRunner
from worker.row_check import RowCounts


def paged(path: Path, key_multiple: int = 512, blocks: int = 60) -> ModelRunner:
    model = load(path)
    cache = KVCache(model.config, blocks, torch.float32, CPU)
    for memory in cache.memories:  # what lies in blocks that nobody owns must not show
        memory[:, :, :, 1:].normal_(generator=torch.Generator().manual_seed(9))
    return ModelRunner(model, cache, RowCounts((64,), (4, 8), key_multiple, True, True))


def prefill(runner: ModelRunner, ids: Tensor, blocks: list[int], cuts: list[int]) -> Tensor:
    """Logits of all rows, computed in passes that end at `cuts`."""
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        rows.append(runner.prefill(ids[start:end].tolist(), blocks, start)[: end - start])
    return torch.stack([runner.head_row(row) for row in torch.cat(rows)])


def assert_decoded_together(runner: ModelRunner, reference: Any, tolerance: float) -> None:
    """Sequences of different lengths decode side by side as `transformers` computes each alone."""
    # The middle one crosses from one block into the next, and reads a table with a gap.
    prompts = [some_ids(3, 5), some_ids(4, 62), some_ids(5, 90)]
    tables = [[11], [12, 20, 13], [14, 15, 16]]
    continuations = [some_ids(seed, 5) for seed in (6, 7, 8)]
    for prompt, table in zip(prompts, tables, strict=True):
        prefill(runner, prompt, table, cuts=list(range(64, len(prompt), 64)))
    for step in range(5):
        tokens = [int(tail[step]) for tail in continuations]
        found = runner.decode(tokens, tables, [len(prompt) + step for prompt in prompts])
        for row, prompt, tail in zip(found, prompts, continuations, strict=True):
            whole = torch.cat([prompt, tail[: step + 1]])
            assert error(row, reference_logits(reference, whole)[-1]) < tolerance
