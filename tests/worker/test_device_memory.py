"""Real models whose snapshots went to disk and came back into another worker: the same bits as a cold run.

Positions are not those of blocks, and conversations share beginnings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import VOCAB, Worker, ids, one_at_a_time
from snapshot_rig import Prompt, prompt
from tiny_models import save_tiny

from worker.tiers.device_memory import PagedMemory

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5": {},
    "gemma4": {"sliding_window": 40},
}


def conversation(turns: int, who: int = 0) -> Prompt:
    return prompt(ids(1, 45), *(ids(100 * who + turn, 29) for turn in range(turns)), tail=ids(9, 3))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    with one_at_a_time() as start:

        def begin(family: str) -> Worker:
            path = tmp_path / family
            if not path.exists():
                save_tiny(path, family, vocab_size=VOCAB, max_position_embeddings=1024, **FAMILIES[family])
            return start(path, disk_cache=str(tmp_path / "cache"))

        yield begin


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_from_disk_are_exact(serve, family: str):
    worker = serve(family)
    asked = {(who, turns): conversation(turns, who) for who, turns in ((0, 4), (1, 2))}
    for request in asked.values():
        worker.serve(request)
    worker.settle()
    cold = {key: worker.serve(request, cache=False, max_tokens=6) for key, request in asked.items()}
    for key, request in asked.items():
        worker = serve(family)
        request_id = worker.ask(request, max_tokens=6)
        worker.run()
        assert worker.depth(request_id) == request.last.end
        assert worker.answer(request_id) == cold[key]
        assert worker.count("prefixd_cache_tokens_total", source="disk") == request.last.end


def test_positions_go_to_other_blocks_and_back(serve):
    worker = serve("qwen3_5")
    cache, states = worker.runner.cache, worker.runner.states
    memory = PagedMemory(cache, states)
    for rows in cache.memories:
        rows.copy_(torch.randn_like(rows))
    parts = memory.empty("kv", 50)
    memory.read([5, 2, 9], 13, 40, parts, 3)
    before = [rows.clone() for rows in cache.memories]
    memory.write([20, 21, 22], 13, 40, parts, 3)
    again = memory.empty("kv", 50)
    memory.read([20, 21, 22], 13, 40, again, 3)
    for name, part in parts.items():
        assert part[:, :, :, 3:30].equal(again[name][:, :, :, 3:30])
    for was, rows in zip(before, cache.memories, strict=True):
        untouched = [block for block in range(cache.num_blocks) if block not in (20, 21)]
        assert was[:, :, :, untouched].equal(rows[:, :, :, untouched])
        assert was[:, :, :, 20, :13].equal(rows[:, :, :, 20, :13])
        assert was[:, :, :, 21, 8:].equal(rows[:, :, :, 21, 8:])
    states.memory[3] = torch.randn_like(states.memory[3])
    memory.read_state(3, kept := memory.empty("state", 1))
    memory.write_state(6, kept)
    assert states.memory[6].equal(states.memory[3])
