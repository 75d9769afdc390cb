"""Models whose attention layers differ, through the pool: windows, sizes of their own, keys of another layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_caller import CPU, error, load, reference_logits, some_ids
from paged_rig import assert_decoded_together, paged, prefill
from tiny_models import save_tiny
from torch import Tensor

from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.model_config import load_config
from worker.row_check import check_rows

TOLERANCE = 1e-4
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "sliding_window": 70,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {"short window": {}, "shared keys": SHARED}


@pytest.mark.parametrize("key_multiple", [64, 512])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_chunks(tmp_path: Path, variant: str, key_multiple: int) -> None:
    reference = save_tiny(tmp_path, "gemma4", **VARIANTS[variant])
    ids = some_ids(1, 200)
    found = prefill(paged(tmp_path, key_multiple), ids, [9, 3, 30, 17, 50, 51, 52], [1, 38, 64, 96, 160])
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_sequences_of_different_lengths_together(tmp_path: Path, variant: str) -> None:
    reference = save_tiny(tmp_path, "gemma4", **VARIANTS[variant])
    assert_decoded_together(paged(tmp_path), reference, TOLERANCE)


def test_layers_that_share_keys_have_no_memory(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4", **SHARED)
    config = load_config(tmp_path)
    # Of the three that keep keys, two slide (2 heads of 16), one sees everything (1 head of 32).
    assert block_bytes(config, torch.float32) == 2 * BLOCK_TOKENS * (2 * 2 * 16 + 32) * 4
    cache = KVCache(config, 7, torch.float32, CPU)
    assert sum(memory.nbytes for memory in cache.memories) == 7 * block_bytes(config, torch.float32)


def test_blocks_are_copied_saved_and_loaded_in_every_layer(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4", **SHARED)
    cache = KVCache(load_config(tmp_path), 7, torch.float32, CPU)
    for memory in cache.memories:
        memory.normal_()
    before = [memory.clone() for memory in cache.memories]
    cache.copy_block(2, 5)
    saved = cache.save([5, 3])
    cache.load([6, 1], saved)
    for memory, old in zip(cache.memories, before, strict=True):
        assert torch.equal(memory[:, :, :, [5, 6, 1]], old[:, :, :, [2, 2, 3]])
        assert torch.equal(memory[:, :, :, [0, 2, 3, 4]], old[:, :, :, [0, 2, 3, 4]])


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma4", "qwen3_5"])
def test_the_start_up_check_runs_layers_of_every_shape(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    model = load(tmp_path)
    ran: list[int] = []
    forward = model.forward

    def count(ids: Tensor, attend: Any, num_layers: int | None = None, recur: Any = None) -> Tensor:
        ran.append(num_layers or 0)
        result: Tensor = forward(ids, attend, num_layers=num_layers, recur=recur)
        return result

    model.forward = count
    counts = check_rows(model, torch.float32, 512, deterministic=True)
    assert counts.exact
    assert 64 in counts.prefill
    assert set(ran) == {model.config.layers_of_each_shape}
