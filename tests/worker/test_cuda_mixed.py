"""The CUDA backend's passes for models of mixed layers, with operations in plain torch as any machine can run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_caller import error, reference_logits
from tiny_models import save_tiny

from worker.cuda import dense, hybrid, sliding
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_ops import TorchMixedOps
from worker.cuda.mixed_runner import MixedRunner
from worker.cuda.product_check import check_products
from worker.cuda.sliding import SlidingModel
from worker.kv_cache import KVCache
from worker.model_config import load_config
from worker.recurrent import StatePool
from worker.steps import StateUse
from worker.weights import iter_weights

CPU = torch.device("cpu")
PROMPT = 150
BLOCKS = [9, 3, 30, 17, 22, 5, 40]
OTHERS = [50, 51, 52]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("qwen3_5", {}),
    "sliding": ("gemma4", {"final_logit_softcapping": 3.0}),
    "sharing": (
        "gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
        },
    ),
}


def make(path: Path, kind: str) -> tuple[Any, MixedRunner]:
    """The model as `transformers` has it, and its runner."""
    family, changes = MODELS[kind]
    reference = save_tiny(path, family, **changes)
    config = load_config(path)
    made = HybridModel if family == "qwen3_5" else SlidingModel
    model = made(config, iter_weights(path, config), torch.float32, CPU, 512)
    states = StatePool(config, 6, CPU) if family == "qwen3_5" else None
    return reference, MixedRunner(
        model, KVCache(config, 64, torch.float32, CPU), TorchMixedOps(), (128, 256), states
    )


def prompt(count: int = PROMPT) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str):
    reference, run = make(tmp_path, kind)
    ids = prompt()
    expected = reference_logits(reference, torch.tensor(ids))
    hidden = run.prefill(ids, BLOCKS, 0, StateUse(1, 0, ((70, 2),), (70,)))
    assert error(run.head_row(hidden[PROMPT - 1]), expected[-1]) < 2e-4
    hidden = run.prefill(ids[70:], BLOCKS, 70, StateUse(3, 2, ()))
    assert error(run.head_row(hidden[PROMPT - 71]), expected[-1]) < 2e-4


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_decode_goes_on_from_prefill(tmp_path: Path, kind: str):
    reference, run = make(tmp_path, kind)
    ids = prompt(80)
    expected = reference_logits(reference, torch.tensor(ids))
    run.prefill(ids[:77], BLOCKS, 0, StateUse(1, 0, ()))
    run.prefill(ids[:33], OTHERS, 0, StateUse(2, 0, ()))
    found = run.decode([ids[77], ids[33]], [BLOCKS, OTHERS], [77, 33], [1, 2])
    assert error(found, expected[[77, 33]]) < 2e-4
    assert error(run.decode([ids[78]], [BLOCKS], [78], [1])[0], expected[78]) < 2e-4


@torch.no_grad()
def test_a_state_goes_to_every_entry_that_wants_it(tmp_path: Path):
    _, run = make(tmp_path, "hybrid")
    assert run.states is not None
    run.states.memory.normal_()
    run.states.clear(0)
    before = run.states.memory.clone()
    run.prefill(prompt(), BLOCKS, 0, StateUse(1, 0, ((70, 2), (150, 3), (150, 4)), (70,)))
    memory = run.states.memory
    assert torch.equal(memory[1], memory[3])
    assert torch.equal(memory[1], memory[4])
    assert not torch.equal(memory[1], memory[2])
    assert torch.equal(memory[[0, 5]], before[[0, 5]])
    saved = run.save(BLOCKS[:2], 2)
    run.load(OTHERS[:2], 5, saved)
    assert torch.equal(memory[5], memory[2])


def test_shapes_of_products_are_checked_for_each_kind_of_layer(tmp_path: Path):
    class Fickle(TorchMixedOps):
        """A library whose rows are others at one count, for one shape."""

        def product(self, x: Any, weight: Any) -> Any:
            return x[:, :1] + len(x) * (len(x) == 128 and len(weight) in shapes)

    _, run = make(tmp_path, "sharing")
    for index in range(len(run.model.products())):
        shapes = {len(run.model.products()[index])}
        counts, padded = check_products(run.model, Fickle(), (128, 512))
        assert counts == (128, 512)
        assert {outputs for _, outputs, _ in padded} == shapes
        assert set(padded.values()) == {512}


def test_what_is_served(tmp_path: Path):
    save_tiny(tmp_path, "qwen3_5")
    odd = load_config(tmp_path)
    assert not hybrid.is_served(odd, torch.bfloat16), "heads of 24"
    fitting = {"head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    save_tiny(tmp_path, "qwen3_5", **fitting)
    config = load_config(tmp_path)
    assert hybrid.is_served(config, torch.bfloat16)
    assert not hybrid.is_served(config, torch.float32)
    assert not dense.is_served(config, torch.bfloat16)
    assert not sliding.is_served(config, torch.bfloat16)
    save_tiny(tmp_path, "gemma4")
    config = load_config(tmp_path)
    assert sliding.is_served(config, torch.bfloat16)
    assert not hybrid.is_served(config, torch.bfloat16)
