"""A packed decode step against the same values in the wide layout, and against itself in other company."""

from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from worker.kv_cache import KVCache
from worker.model_config import load_config
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.packed_step import PackedStep
from worker.row_check import RowCounts, check_rows
from worker.vector_ops import HAS_PAIRS
from worker.weights import iter_weights

pytestmark = pytest.mark.skipif(not HAS_PAIRS, reason="this processor has no bfloat16 product")

SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
}
FAMILIES = ["llama", "qwen2", "qwen3"]
CPU = torch.device("cpu")
LENGTHS = [0, 1, 31, 32, 70]
TABLES = [[1], [2], [3], [4, 5], [6, 7, 9]]


def runner(path, family, **options) -> ModelRunner:
    shape = dict(SHAPE)
    if family == "qwen2":  # has no head size of its own: that of hidden size over heads
        shape |= {"hidden_size": 192}
        del shape["head_dim"]
    save_tiny(path, family, **(shape | options))
    config = load_config(path)
    model = LlamaModel(config, iter_weights(path, config), torch.bfloat16, CPU, 256, packed=True)
    return ModelRunner(
        model, KVCache(config, 12, torch.bfloat16, CPU), RowCounts((64, 128), (8,), 512, True, True)
    )


def filled(path, family) -> ModelRunner:
    """One whose sequences hold something before each of LENGTHS."""
    run = runner(path, family)
    for number, (table, length) in enumerate(zip(TABLES, LENGTHS, strict=True)):
        if length:
            run.prefill([(7 * number + i) % 96 for i in range(length)], table, 0)
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_computes_what_the_wide_layout_does(tmp_path, family):
    run = filled(tmp_path, family)
    before = run.cache.memories[0].clone()
    ids = [3, 50, 7, 95, 20]
    packed = run.decode(ids, TABLES, LENGTHS)
    stored = run.cache.memories[0].clone()
    run.cache.memories[0].copy_(before)
    run._packed_step = None
    wide = run.decode(ids, TABLES, LENGTHS)
    assert packed.shape == wide.shape
    assert (packed - wide).abs().max() < 0.03 * wide.abs().max()
    expected = run.cache.memories[0].float()
    assert (stored.float() - expected).abs().max() < 0.03 * expected.abs().max()
    assert not torch.equal(stored, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_alone_and_in_company(tmp_path, family):
    run = filled(tmp_path, family)
    step = run._packed_step
    assert step is not None
    before = run.cache.memories[0].clone()
    together = step(torch.tensor([3, 50, 7, 95, 20]), TABLES, LENGTHS)
    stored = run.cache.memories[0].clone()
    run.cache.memories[0].copy_(before)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for row, token in enumerate([3, 50, 7, 95, 20]):
            alone = step(torch.tensor([token]), TABLES[row : row + 1], LENGTHS[row : row + 1])
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(run.cache.memories[0], stored)


@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"intermediate_size": 112}, {"hidden_size": 84}]
)
def test_a_model_that_the_step_cannot_take_goes_without(tmp_path, options):
    run = runner(tmp_path, "llama", **options)
    assert run._packed_step is None
    assert run.decode([3], [[1]], [0]).isfinite().all()


def test_the_start_up_check_runs_the_step(tmp_path, monkeypatch):
    run = runner(tmp_path, "llama")
    assert check_rows(run.model, torch.bfloat16, 256, deterministic=True).exact
    plain = PackedStep.__call__
    monkeypatch.setattr(PackedStep, "__call__", lambda self, *given: plain(self, *given) + len(given[2]))
    assert not check_rows(run.model, torch.bfloat16, 256, deterministic=True).exact
