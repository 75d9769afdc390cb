"""What sets Qwen3.5 apart: states, its files and its config, of which what we would not compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_caller import CPU, DenseCaller, error, load, reference_logits, some_ids
from mixed_families import TOLERANCE, add_tensors, save_released
from tiny_models import make_tiny, save_tiny
from torch import Tensor

from worker.heads import HeadNorms
from worker.model_config import ModelError, load_config, parse_config
from worker.model_shape import AttentionLayer, DeltaLayer, Rope
from worker.models import Qwen3_5Model, model_class
from worker.recurrent import Recurrence, StatePool

TOKENS = 100


@pytest.mark.parametrize("shard_size", [None, "30KB"])
def test_the_layout_of_released_checkpoints(tmp_path: Path, shard_size: str | None) -> None:
    """A model of text and images, with layers that guess ahead: their names and tensors, one config inside another."""
    text = make_tiny("qwen3_5").config
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "patch_size": 4,
    }
    torch.manual_seed(3)
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    ).eval()
    save_released(tmp_path, whole, "model.visual.", shard_size, {"mtp.fc.weight": torch.ones(2, 2)})
    ids = some_ids(4, 30)
    assert error(DenseCaller(load(tmp_path)).logits(ids), reference_logits(whole, ids)) < TOLERANCE


def test_a_tensor_of_an_unknown_part_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5")
    add_tensors(tmp_path, {"model.layers.0.linear_attn.in_proj_ba.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match="in_proj_ba"):
        load(tmp_path)


def test_the_config_says_what_each_layer_needs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5")
    config = load_config(tmp_path)
    assert model_class(config) is Qwen3_5Model
    delta = DeltaLayer(k_heads=2, v_heads=4, k_dim=8, v_dim=12, taps=4)
    attention = AttentionLayer(6, 2, 24, Rope(24, 1e4, pairs=6, span=12))
    assert config.layers == (delta, delta, delta, attention)
    assert config.layers_of_each_shape == 4


def test_layer_types_follow_from_an_interval() -> None:
    config = parse_config({**FIELDS, "full_attention_interval": 3})
    kinds = [isinstance(layer, AttentionLayer) for layer in config.layers]
    assert kinds == [False, False, True, False, False, True, False, False]
    assert [isinstance(layer, AttentionLayer) for layer in parse_config(FIELDS).layers] == [False] * 3 + [True] + [
        False
    ] * 3 + [True]


FIELDS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mamba_ssm_dtype": "float32",
}


def test_tying_is_read_from_the_outer_config_first() -> None:
    inner = {**FIELDS, "tie_word_embeddings": True}
    assert parse_config({"model_type": "qwen3_5", "text_config": inner}).tie_word_embeddings
    outer = {"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": False, "vision_config": {}}
    assert not parse_config(outer).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3_5_moe_text"}, "model_type"),
        ({"num_experts": 128}, "num_experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"layer_types": 8}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.001}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_what_is_not_implemented_is_refused_by_the_name_of_its_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"^{named}:"):
        parse_config({**FIELDS, **changes})


def test_a_field_inside_text_config_is_named_with_it() -> None:
    with pytest.raises(ModelError, match=r"^text_config\.num_experts:"):
        parse_config({"model_type": "qwen3_5", "text_config": {**FIELDS, "num_experts": 8}})


def test_rows_and_state_have_the_same_bits_wherever_a_prompt_is_cut(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5", layer_types=["linear_attention"] * 4)
    model = load(tmp_path)
    ids = some_ids(6, TOKENS)

    def no_attention(_layer: int, _qkv: Tensor, _norms: HeadNorms | None) -> Tensor:
        raise AssertionError

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        pool = StatePool(model.config, 1, CPU)
        rows = []
        for start, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
            padded = torch.zeros(64, dtype=torch.int64)
            padded[: end - start] = ids[start:end]
            recur = Recurrence.prefill(pool, 0, end - start)
            rows.append(model.forward(padded, no_attention, recur=recur)[: end - start])
        return torch.cat(rows), pool.memory

    expected_rows, expected_state = run([64])
    for cuts in ([50], [63, 64, 65], [1, 38, 99], list(range(7, 100, 7))):
        rows, state = run(cuts)
        assert torch.equal(rows, expected_rows)
        assert torch.equal(state, expected_state)


def test_the_saved_config_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_5")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_text"
    assert load_config(tmp_path).max_position_embeddings == 512
