"""Blocks on their way to the host and back, some at a time."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from worker import kv_cache
from worker.kv_cache import KVCache
from worker.model_config import load_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_blocks_come_back_into_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr(kv_cache, "_SWAPPED_BLOCKS", at_once)
    save_tiny(tmp_path, "llama")
    cache = KVCache(load_config(tmp_path), 9, torch.float32, CPU)
    (memory,) = cache.memories
    memory.normal_()
    before = memory.clone()
    saved = cache.save([5, 3, 8])
    memory[:, :, :, [5, 3, 8]] = 0.0
    cache.load([1, 8, 2], saved)
    assert torch.equal(memory[:, :, :, [1, 8, 2]], before[:, :, :, [5, 3, 8]])
    assert torch.equal(memory[:, :, :, [0, 4, 6, 7]], before[:, :, :, [0, 4, 6, 7]])
