"""Gemma 4 as we define it computes what `transformers` computes, and what it would not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_caller import DenseCaller, error, load, reference_logits, some_ids
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, randomise, save_tiny
from torch import Tensor

from worker.model_config import ModelError, load_config, parse_config
from worker.model_shape import AttentionLayer, Rope, RopeScaling
from worker.models import Gemma4Model, model_class
from worker.weights import iter_weights, weight_names

TOLERANCE = 1e-4  # of the largest logit; float32 in another order differs by up to 3e-5 of it here
TOKENS = 100

SHARED = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "capped": {"final_logit_softcapping": 5.0},
    "shared keys": {**SHARED, "num_kv_shared_layers": 3},
    "shared keys, wide": {**SHARED, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "embeddings by layer": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "window longer than the prompt": {"sliding_window": 128},
    "window of one": {"sliding_window": 1, "attention_bias": True, "rms_norm_eps": 1e-2},
    "most layers slide": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "num_key_value_heads": 1},
    "all at once": {
        **SHARED,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_of_a_prompt(tmp_path: Path, variant: str) -> None:
    reference = save_tiny(tmp_path, "gemma4", **VARIANTS[variant])
    ids = some_ids(1, TOKENS)
    assert error(DenseCaller(load(tmp_path)).logits(ids), reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_token_by_token_after_a_prompt_in_chunks(tmp_path: Path, variant: str) -> None:
    reference = save_tiny(tmp_path, "gemma4", **VARIANTS[variant])
    ids = some_ids(2, TOKENS)
    caller = DenseCaller(load(tmp_path))
    lengths = [1, 2, 37, 30, *[1] * 30]
    found = torch.cat([caller.logits(part) for part in ids.split(lengths)])
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


def test_caps_and_windows_matter_to_these_models(tmp_path: Path) -> None:
    """What the variants vary shows in the logits, or they prove nothing."""
    ids = some_ids(3, TOKENS)
    plain = make_tiny("gemma4")
    for changes in ({"final_logit_softcapping": 5.0}, {"sliding_window": 128}, {"sliding_window": 10}):
        assert error(reference_logits(make_tiny("gemma4", **changes), ids), reference_logits(plain, ids)) > 1e-3


@pytest.mark.parametrize("shard_size", [None, "30KB"])
def test_the_layout_of_released_checkpoints(tmp_path: Path, shard_size: str | None) -> None:
    """A model of text and images: its names and tensors, one config inside another, unused keys of sharing layers."""
    text = make_tiny("gemma4", **VARIANTS["all at once"]).config
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
    randomise(whole)
    whole.save_pretrained(tmp_path, **({"max_shard_size": shard_size} if shard_size else {}))
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert any(name.startswith("model.language_model.layers.") for name in names)
    assert any(name.startswith("model.vision_tower.") for name in names)
    if shard_size is None:
        unused = "model.language_model.layers.5.self_attn."
        rewrite(tmp_path, {f"{unused}k_proj.weight": torch.ones(2, 2), f"{unused}k_norm.weight": torch.ones(2)})
    else:
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = some_ids(4, 30)
    assert error(DenseCaller(load(tmp_path)).logits(ids), reference_logits(whole, ids)) < TOLERANCE


def rewrite(directory: Path, added: dict[str, Tensor]) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **added}, path)


def test_keys_that_a_layer_should_have_once_are_refused_twice(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4")
    rewrite(tmp_path, {"model.language_model.norm.weight": torch.ones(48)})
    with pytest.raises(ModelError, match=r"norm\.weight stands there under another name too"):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["plain", "all at once"])
def test_shards_of_a_text_model_hold_what_the_config_says(tmp_path: Path, variant: str) -> None:
    model = save_tiny(tmp_path, "gemma4", shard_size="30KB", **VARIANTS[variant])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = dict(iter_weights(tmp_path, load_config(tmp_path)))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == weight_names(load_config(tmp_path))
    stored = model.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())


def test_the_config_says_what_each_layer_needs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma4", **SHARED, num_kv_shared_layers=3)
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


def test_bfloat16_weights_stay_near(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "gemma4", initializer_range=0.1)
    ids = some_ids(5, 30)
    found = DenseCaller(load(tmp_path, torch.bfloat16)).logits(ids)
    assert 0 < error(found, reference_logits(reference, ids)) < 0.15


def test_packed_weights_are_the_same_in_both_layouts(tmp_path: Path) -> None:
    """Few rows run packed and many in a wider type; the values are those of one model."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "initializer_range": 0.1,
        "hidden_size_per_layer_input": 32,
    }
    save_tiny(tmp_path, "gemma4", **shape)
    model = load(tmp_path, packed=True)
    ids = some_ids(6, 30)
    caller = DenseCaller(model)
    singly = torch.cat([caller.logits(token) for token in ids.split(1)])
    assert 0 < error(singly, DenseCaller(model).logits(ids)) < 0.15
