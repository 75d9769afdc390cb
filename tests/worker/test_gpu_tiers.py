"""Snapshots that left the card and came back, from the host and from disk in another worker: the bits of a cold run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import Worker, ids, one_at_a_time
from gpu_rig import MIXED, models, on_a_card
from snapshot_rig import Prompt, prompt

from worker.snapshot_clearing import Clearing
from worker.tiers.device_memory import PagedMemory

pytestmark = on_a_card
STEPS = 8
Serve = Callable[..., Worker]


def conversation(turns: int, who: int = 0) -> Prompt:
    """Of lengths that are multiples of nothing, longer than a captured pass."""
    return prompt(
        ids(9_000 + who, 745), *(ids(100 * who + turn, 429 + turn) for turn in range(turns)), tail=(9, 3)
    )


ASKED = [conversation(turns, who) for who, turns in ((0, 5), (1, 2), (2, 30))]
path = models(["qwen3", *MIXED])


@pytest.fixture
def serve(path: Path) -> Iterator[Serve]:
    with one_at_a_time() as start:
        yield partial(start, path, device="cuda", kv_memory="2GiB", verify_hits=1.0)


def assert_hits_of(worker: Worker, source: str, cold: list[Any]) -> None:
    """Every prompt starts from what the tier holds, and goes on like a cold run."""
    for request, expected in zip(ASKED, cold, strict=True):
        request_id = worker.ask(request, max_tokens=STEPS)
        worker.run()
        assert worker.depth(request_id) == request.last.end
        assert worker.answer(request_id) == expected
    loaded = worker.count("prefixd_cache_tokens_total", source=source)
    assert loaded == sum(request.last.end for request in ASKED)
    background = worker.engine._scheduler.background
    while not background.is_empty:
        worker.engine.turn(wait=False)
    assert (background.verified, background.mismatched) == (len(ASKED), 0)


def test_hits_from_disk_after_a_restart(serve: Serve, tmp_path: Path):
    tiers = {"disk_cache": str(tmp_path / "cache"), "host_memory": "1GiB"}
    worker = serve(**tiers)
    cold = [worker.serve(request, cache=False, max_tokens=STEPS) for request in ASKED]
    for request in ASKED:
        worker.serve(request)
    worker.settle()
    assert_hits_of(serve(**tiers), "disk", cold)


def test_hits_from_the_host(serve: Serve):
    worker = serve(host_memory="1GiB")
    cold = [worker.serve(request, cache=False, max_tokens=STEPS) for request in ASKED]
    for request in ASKED:
        worker.serve(request)
    worker.settle()
    store = worker.engine._store
    assert Clearing(store).make_room(store.pool.free_count + store.held_count)
    assert store.snapshot_count == 0
    for memory in worker.runner.cache.memories:
        memory[:, :, :, 1:].normal_()
    assert_hits_of(worker, "host", cold)


def test_what_is_copied_to_the_host_is_pinned_and_comes_back_whole(serve: Serve):
    worker = serve()
    cache, states = worker.runner.cache, getattr(worker.runner, "states", None)
    memory = PagedMemory(cache, states)
    for rows in cache.memories:
        rows.normal_()
    parts = memory.empty("kv", 90)
    assert all(part.is_pinned() for part in parts.values())
    memory.read([5, 2, 9, 7], 13, 100, parts, 3)
    before = [rows.clone() for rows in cache.memories]
    memory.write([20, 21, 22, 23], 13, 100, parts, 3)
    for rows, was in zip(cache.memories, before, strict=True):
        assert torch.equal(
            rows[:, :, :, [20, 21, 22, 23]].flatten(3, 4)[:, :, :, 13:100],
            was[:, :, :, [5, 2, 9, 7]].flatten(3, 4)[:, :, :, 13:100],
        )
        rows[:, :, :, [20, 21, 22, 23]] = was[:, :, :, [20, 21, 22, 23]]
        assert torch.equal(rows, was), "others' blocks were written to"
    if states is not None:
        states.memory[3].normal_()
        kept = memory.empty("state", 1)
        memory.read_state(3, kept)
        memory.write_state(4, kept)
        assert torch.equal(states.memory[4], states.memory[3])
