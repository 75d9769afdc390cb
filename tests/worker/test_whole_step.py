"""A whole decode step against the same values in the wide layout, and against itself in other company."""

from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from worker.int4 import Tiles, can_pack, quantize, untiled
from worker.kv_cache import KVCache
from worker.model_config import load_config
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.row_check import RowCounts, check_rows
from worker.tiled_linear import FloatTiles, float_tiles
from worker.vectors import HAS_PAIRS, HAS_WIDE
from worker.weights import iter_weights
from worker.whole_step import WholeStep

pytestmark = pytest.mark.skipif(not (HAS_PAIRS and HAS_WIDE), reason="this processor has none of the kernels")

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
LENGTHS = [0, 1, 31, 32, 70, 7, 12, 20, 2]
TABLES = [[1], [2], [3], [4, 5], [6, 7, 9], [10], [11], [12], [13]]
TOKENS = [3, 50, 7, 95, 20, 11, 80, 33, 64]
# And how far the two ways may differ. The values of the third go into 4 bits and stay what they are.
KINDS = {"packed": (torch.bfloat16, 0.03), "float32": (torch.float32, 1e-5), "exact": (torch.float32, 1e-5)}


def in_four_bits(weight):
    return quantize(weight, torch.float16).values() if weight.ndim == 2 and can_pack(weight) else weight


def runner(path, family, kind="packed", **options) -> ModelRunner:
    shape = dict(SHAPE)
    if family == "qwen2":  # has no head size of its own: that of hidden size over heads
        shape |= {"hidden_size": 192}
        del shape["head_dim"]
    save_tiny(path, family, **(shape | options))
    config = load_config(path)
    dtype, _ = KINDS[kind]
    weights = iter_weights(path, config)
    if kind == "exact":
        weights = ((name, in_four_bits(weight) if ".layers." in name else weight) for name, weight in weights)
    model = LlamaModel(config, weights, dtype, CPU, 256, packed=kind == "packed")
    return ModelRunner(model, KVCache(config, 16, dtype, CPU), RowCounts((64, 128), (16,), 512, True, True))


def filled(path, family, kind) -> ModelRunner:
    """One whose sequences hold something before each of LENGTHS."""
    run = runner(path, family, kind)
    for number, (table, length) in enumerate(zip(TABLES, LENGTHS, strict=True)):
        if length:
            run.prefill([(7 * number + i) % 96 for i in range(length)], table, 0)
    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_computes_what_the_wide_layout_does(tmp_path, family, kind):
    run = filled(tmp_path, family, kind)
    before = run.cache.memories[0].clone()
    step = run.decode(TOKENS, TABLES, LENGTHS)
    stored = run.cache.memories[0].clone()
    run.cache.memories[0].copy_(before)
    run._whole_step = None
    wide = run.decode(TOKENS, TABLES, LENGTHS)
    _, near = KINDS[kind]
    assert step.shape == wide.shape
    assert (step - wide).abs().max() < near * wide.abs().max()
    expected = run.cache.memories[0].float()
    assert (stored.float() - expected).abs().max() < near * expected.abs().max()
    assert not torch.equal(stored, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_go_into_four_bits_give_the_bits_of_their_float32_values(tmp_path, family):
    run = filled(tmp_path, family, "exact")
    layers, count = run.model.layers, run.model.weight_bytes
    assert all(type(layer.qkv.tiles) is Tiles for layer in layers)
    step = run._whole_step
    before = run.cache.memories[0].clone()
    small = step(torch.tensor(TOKENS), TABLES, LENGTHS)
    run.cache.memories[0].copy_(before)
    # One layer in float32 is enough: its product must then be of one kind in all of them.
    for name in ("qkv", "out", "gate", "up", "down"):
        linear = getattr(layers[1], name)
        linear.tiles = float_tiles(untiled(linear.tiles))
    wide = WholeStep.of(run.model, run.cache)
    assert all(type(layer.down.tiles) is FloatTiles for layer in layers)
    assert run.model.weight_bytes > count
    assert torch.equal(wide(torch.tensor(TOKENS), TABLES, LENGTHS), small)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_alone_and_in_company(tmp_path, family, kind):
    run = filled(tmp_path, family, kind)
    step = run._whole_step
    assert step is not None
    before = run.cache.memories[0].clone()
    together = step(torch.tensor(TOKENS), TABLES, LENGTHS)
    stored = run.cache.memories[0].clone()
    run.cache.memories[0].copy_(before)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for row, token in enumerate(TOKENS):
            alone = step(torch.tensor([token]), TABLES[row : row + 1], LENGTHS[row : row + 1])
            assert torch.equal(alone[0], together[row])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(run.cache.memories[0], stored)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"intermediate_size": 112}, {"hidden_size": 84}]
)
def test_a_model_that_the_step_cannot_take_goes_without(tmp_path, options, kind):
    run = runner(tmp_path, "llama", kind, **options)
    assert run._whole_step is None
    assert run.decode([3], [[1]], [0]).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_up_check_runs_the_step(tmp_path, monkeypatch, kind):
    run = runner(tmp_path, "llama", kind)
    dtype = run.cache.dtype
    assert check_rows(run.model, dtype, 256, deterministic=True).exact
    plain = WholeStep.__call__
    monkeypatch.setattr(WholeStep, "__call__", lambda self, *given: plain(self, *given) + len(given[2]))
    assert not check_rows(run.model, dtype, 256, deterministic=True).exact


def test_float32_is_held_twice_where_the_model_is_small_and_both_are_counted(tmp_path, monkeypatch):
    twice = runner(tmp_path, "llama", "float32").model
    layers = sum(layer.qkv.tiles.values.nbytes + layer.out.tiles.values.nbytes for layer in twice.layers)
    layers += sum(3 * layer.gate.tiles.values.nbytes for layer in twice.layers)
    monkeypatch.setattr("worker.models.llama._MOST_TWICE", layers - 1)
    once = runner(tmp_path, "llama", "float32")
    assert once._whole_step is None
    assert twice.weight_bytes - once.model.weight_bytes == layers
