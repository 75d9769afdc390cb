"""What `load_config` reads from both kinds of files, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, LLAMA3_ROPE, make_tiny, save_tiny, write_gguf

from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_MODEL, resolve_model
from worker.model_config import ModelConfig, ModelError, RopeScaling, load_config, parse_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "head_dim": None, "use_sliding_window": False, "sliding_window": 4096}
LLAMA3 = RopeScaling(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_saved_by_transformers_is_read_field_by_field(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    assert load_config(tmp_path) == ModelConfig(
        architecture="llama" if family == "mistral" else family,  # type: ignore[arg-type]
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8 if family == "qwen2" else 16,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        attention_bias=family == "qwen2",
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        tie_word_embeddings=False,
        max_position_embeddings=512,
        sliding_window=None,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_config_of_the_model_it_was_made_from(
    tmp_path: Path, family: str, tied: bool
) -> None:
    model = save_tiny(tmp_path / "hf", family, tie_word_embeddings=tied)
    write_gguf(tmp_path / "model.gguf", model)
    config = load_config(tmp_path / "model.gguf")
    assert config == load_config(tmp_path / "hf")
    assert config.tie_word_embeddings == tied


def test_biases_of_llama_come_from_the_config_or_from_the_tensors(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "model.gguf", model)
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        config = load_config(path)
        assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)


def test_rope_fields_are_read_from_both_layouts() -> None:
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    old = parse_config({**LLAMA, "rope_theta": 10_000.0, "rope_scaling": scaling})
    new = parse_config({**LLAMA, "rope_theta": None, "rope_parameters": LLAMA3_ROPE})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (10_000.0, LLAMA3)


def test_scaling_type_may_have_its_older_name() -> None:
    config = parse_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", factor=4.0)


def test_old_llama_configs_without_newer_fields_are_completed() -> None:
    fields = {**LLAMA, "rope_theta": None}
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings"):
        del fields[name]
    config = parse_config(fields)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (32, 64, 10_000.0)
    assert not config.tie_word_embeddings


def test_llama3_scaling_of_a_gguf_file_is_its_tensor_of_divisors(tmp_path: Path) -> None:
    divisors = torch.tensor([1.0, 1.0, 1.0, 1.5, 2.25, 8.0, 8.0, 8.0])
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), extra={"rope_freqs.weight": divisors})
    config = load_config(tmp_path / "model.gguf")
    assert config.rope_scaling == RopeScaling("divisors", divisors=tuple(divisors.tolist()))


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama.rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_linear_scaling_of_a_gguf_file(
    tmp_path: Path, metadata: dict[str, float | str], scaling: RopeScaling | None
) -> None:
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), metadata=metadata)
    assert load_config(tmp_path / "model.gguf").rope_scaling == scaling


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),  # what transformers assumes
        ({"model_type": "mistral", "sliding_window": 131072}, None),  # reaches everything
        ({"model_type": "llama", "sliding_window": 4096}, None),  # means nothing there
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, 4096),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4096,
                "max_window_layers": 16,
            },
            None,
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 4096,
                "max_window_layers": 15,
            },
            4096,
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention"] * 16,
            },
            None,
        ),
    ],
)
def test_an_active_sliding_window_limits_the_context(fields: dict[str, Any], window: int | None) -> None:
    assert parse_config({**LLAMA, **fields}).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "model_type: 'mixtral'"),
        ({"model_type": None}, "model_type: missing"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: not implemented (quant_method 'gptq')",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: not implemented (quant_method 'fp8')",
        ),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config: not implemented"),
        ({"model_type": "qwen3_moe"}, "model_type: 'qwen3_moe'"),
        ({"model_type": "qwen3_5_moe"}, "model_type: 'qwen3_5_moe'"),
        (
            {"model_type": "qwen3_5", "text_config": {"quantization_config": {"quant_method": "awq"}}},
            "text_config.quantization_config: not implemented (quant_method 'awq')",
        ),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type: 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type: 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor: -1"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is not an object"),
        ({"rope_theta": float("nan")}, "rope_theta: nan"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "2048"}, "hidden_size: '2048' is not an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not positive"),
        ({"vocab_size": True}, "vocab_size: True is not an integer"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide"),
        ({"head_dim": 63}, "head_dim: 63 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'"),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["linear_attention"] * 16}, "layer_types"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as refused:
        parse_config({**LLAMA, **changes})
    assert str(refused.value).startswith(named)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "rope_scaling.rope_type: 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: 8"),
        ({"llama.expert_count": 8}, "num_local_experts"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"split.count": 3}, "split.count"),
    ],
)
def test_a_gguf_file_that_we_cannot_compute_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, float | str], named: str
) -> None:
    write_gguf(tmp_path / "model.gguf", make_tiny("llama"), metadata=metadata)
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path / "model.gguf")
    assert str(refused.value).startswith(named)


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_config(tmp_path)
    config = tmp_path / "config.json"
    for content, complaint in (("{", "not JSON"), ("[]", "not an object")):
        config.write_text(content)
        with pytest.raises(ModelError, match=complaint):
            load_config(tmp_path)
    config.write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).num_layers == 16


def test_the_embedded_model() -> None:
    try:
        path = resolve_model(EMBEDDED_MODEL)
    except SettingsError as absent:
        pytest.skip(str(absent))
    assert load_config(path) == replace(
        parse_config(LLAMA),
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        rope_theta=100_000.0,
        max_position_embeddings=8192,
    )
