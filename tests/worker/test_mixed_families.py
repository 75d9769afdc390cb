"""Gemma 4 and Qwen3.5 as we define them compute what `transformers` computes, however their weights are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_caller import DenseCaller, error, load, reference_logits, some_ids
from mixed_families import TOLERANCE, VARIANTS
from tiny_models import save_tiny

from worker.model_config import load_config
from worker.weights import iter_weights, weight_names

TOKENS = 100
ALL = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_every_logit_of_a_prompt(tmp_path: Path, family: str, variant: str) -> None:
    reference = save_tiny(tmp_path, family, **VARIANTS[family][variant])
    ids = some_ids(1, TOKENS)
    assert error(DenseCaller(load(tmp_path)).logits(ids), reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize(("family", "variant"), ALL)
def test_decoding_token_by_token_after_a_prompt_in_chunks(tmp_path: Path, family: str, variant: str) -> None:
    reference = save_tiny(tmp_path, family, **VARIANTS[family][variant])
    ids = some_ids(2, TOKENS)
    caller = DenseCaller(load(tmp_path))
    lengths = [1, 2, 37, 30, *[1] * 30]
    found = torch.cat([caller.logits(part) for part in ids.split(lengths)])
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gemma4", "plain"),
        ("gemma4", "all at once"),
        ("qwen3_5", "every fourth attends"),
        ("qwen3_5", "tied, with biases"),
    ],
)
def test_shards_of_a_text_model_hold_what_the_config_says(tmp_path: Path, family: str, variant: str) -> None:
    model = save_tiny(tmp_path, family, shard_size="30KB", **VARIANTS[family][variant])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = dict(iter_weights(tmp_path, load_config(tmp_path)))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == weight_names(load_config(tmp_path))
    stored = model.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


@pytest.mark.parametrize("family", VARIANTS)
def test_bfloat16_weights_stay_near(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family, initializer_range=0.1)
    ids = some_ids(5, 30)
    found = DenseCaller(load(tmp_path, torch.bfloat16)).logits(ids)
    assert 0 < error(found, reference_logits(reference, ids)) < 0.15


@pytest.mark.parametrize(("family", "changes"), [("gemma4", {"hidden_size_per_layer_input": 32}), ("qwen3_5", {})])
def test_packed_weights_are_the_same_in_both_layouts(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Few rows run packed and many in a wider type; the values are those of one model."""
    save_tiny(tmp_path, family, hidden_size=64, intermediate_size=96, initializer_range=0.1, **changes)
    model = load(tmp_path, packed=True)
    ids = some_ids(6, 30)
    caller = DenseCaller(model)
    singly = torch.cat([caller.logits(token) for token in ids.split(1)])
    assert 0 < error(singly, DenseCaller(model).logits(ids)) < 0.15
