"""What sets Gemma 4 apart: caps, windows, its files and its config, of which what we would not compute is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_caller import DenseCaller, error, load, reference_logits, some_ids
from mixed_families import SHARED_KEYS, TOLERANCE, VARIANTS, add_tensors, save_released
from tiny_models import make_tiny, save_tiny

from worker.model_config import ModelError, load_config, parse_config
from worker.model_shape import AttentionLayer, Rope, RopeScaling
from worker.models import Gemma4Model, model_class


def test_caps_and_windows_matter_to_these_models(tmp_path: Path) -> None:
    """What the variants vary shows in the logits, or they prove nothing."""
    ids = some_ids(3, 100)
    plain = make_tiny("gemma4")
    for changes in ({"final_logit_softcapping": 5.0}, {"sliding_window": 128}, {"sliding_window": 10}):
        assert error(reference_logits(make_tiny("gemma4", **changes), ids), reference_logits(plain, ids)) > 1e-3


@pytest.mark.parametrize("shard_size", [None, "30KB"])
def test_the_layout_of_released_checkpoints(tmp_path: Path, shard_size: str | None) -> None:
    """A model of text and images: its names and tensors, one config inside another, unused keys of sharing layers."""
    text = make_tiny("gemma4", **VARIANTS["gemma4"]["all at once"]).config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    torch.manual_seed(3)
    whole = transformers.Gemma4ForConditionalGeneration(
        transformers.Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None)
    ).eval()
    unused = "model.language_model.layers.5.self_attn."
    added = {f"{unused}k_proj.weight": torch.ones(2, 2), f"{unused}k_norm.weight": torch.ones(2)}
    save_released(tmp_path, whole, "model.vision_tower.", shard_size, added)
    ids = some_ids(4, 30)
    assert error(DenseCaller(load(tmp_path)).logits(ids), reference_logits(whole, ids)) < TOLERANCE


def test_keys_that_a_layer_should_have_once_are_refused_twice(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4")
    add_tensors(tmp_path, {"model.language_model.norm.weight": torch.ones(48)})
    with pytest.raises(ModelError, match=r"norm\.weight stands there under another name too"):
        load(tmp_path)


def test_the_config_says_what_each_layer_needs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4", **SHARED_KEYS, num_kv_shared_layers=3)
    config = load_config(tmp_path)
    assert model_class(config) is Gemma4Model
    sliding, full = Rope(16, 1e4, pairs=8, span=16), Rope(32, 1e6, pairs=4, span=32)
    assert config.layers == (
        AttentionLayer(6, 2, 16, sliding, 9),
        AttentionLayer(6, 2, 32, full),
        AttentionLayer(6, 2, 16, sliding, 9),
        AttentionLayer(6, 2, 32, full, None, 1),
        AttentionLayer(6, 2, 16, sliding, 9, 2),
        AttentionLayer(6, 2, 32, full, None, 1),
    )
    assert [layer.parts for layer in config.layers if isinstance(layer, AttentionLayer)] == [10, 10, 10, 6, 6, 6]
    assert config.layers_of_each_shape == 5


FIELDS: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
}


def test_what_a_released_config_leaves_out_is_filled_in() -> None:
    config = parse_config({"model_type": "gemma4", "text_config": FIELDS, "vision_config": {"depth": 3}})
    sliding = AttentionLayer(8, 2, 256, Rope(256, 1e4, 128, 256), 512)
    full = AttentionLayer(8, 2, 512, Rope(512, 1e6, 64, 512))
    assert config.layers == ((sliding,) * 5 + (full,)) * 2
    assert config.tie_word_embeddings
    assert config.gemma4 is not None
    assert (config.gemma4.per_layer_size, config.gemma4.logit_cap) == (256, 30.0)


def test_global_layers_have_kv_heads_of_their_own_where_values_are_keys() -> None:
    config = parse_config({**FIELDS, "attention_k_eq_v": True})
    assert [layer.num_kv_heads for layer in config.layers[:6] if isinstance(layer, AttentionLayer)] == [2] * 5 + [
        1
    ]


def test_proportional_frequencies_may_be_stretched() -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0},
    }
    last = parse_config({**FIELDS, "rope_parameters": rope}).layers[-1]
    assert isinstance(last, AttentionLayer)
    assert last.rope == Rope(512, 1e6, 256, 512, RopeScaling("linear", factor=8.0))


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"enable_moe_block": True, "num_experts": 8}, "enable_moe_block"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": ["linear_attention"] * 12}, "layer_types"),
        ({"layer_types": ["full_attention"] * 11}, "layer_types"),
        ({"layer_types": ["full_attention"] * 11 + ["sliding_attention"]}, "layer_types"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input"),
        ({"per_layer_config": {"3": {"num_attention_heads": 4}}}, "per_layer_config.3.num_attention_heads"),
        ({"per_layer_config": {"11": {"head_dim": 512}}, "num_kv_shared_layers": 1}, "per_layer_config"),
        ({"rope_parameters": {"sliding_attention": ROPE}}, "rope_parameters.full_attention"),
        (
            {"rope_parameters": {"sliding_attention": {**ROPE, "rope_type": "yarn"}, "full_attention": ROPE}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        (
            {"rope_parameters": {"sliding_attention": {**ROPE, "partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_the_name_of_its_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"^{named}:"):
        parse_config({**FIELDS, **changes})
