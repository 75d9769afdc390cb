"""Gemma 4 and Qwen3.5, whose layers are not all alike: which of their models are tried, and files as released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import randomise

TOLERANCE = 1e-4  # of the largest logit; float32 in another order differs by up to 3e-5 of it here
SHARED_KEYS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4": {
        "plain": {},
        "untied": {"tie_word_embeddings": False},
        "capped": {"final_logit_softcapping": 5.0},
        "shared keys": {**SHARED_KEYS, "num_kv_shared_layers": 3},
        "shared keys, wide": {**SHARED_KEYS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "embeddings by layer": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
        "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "window longer than the prompt": {"sliding_window": 128},
        "window of one": {"sliding_window": 1, "attention_bias": True, "rms_norm_eps": 1e-2},
        "most layers slide": {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_key_value_heads": 1,
        },
        "all at once": {
            **SHARED_KEYS,
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
    },
    "qwen3_5": {
        "every fourth attends": {},
        "every second attends": {"layer_types": ["linear_attention", "full_attention"] * 2},
        "the first attends": {"layer_types": ["full_attention"] + ["linear_attention"] * 3},
        "as many key as value heads": {"linear_num_key_heads": 4, "num_key_value_heads": 6},
        "one key head": {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "num_key_value_heads": 1},
        "long keys": {"linear_key_head_dim": 20, "linear_value_head_dim": 5},
        "short convolution": {"linear_conv_kernel_dim": 2},
        "tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-2},
        "a quarter turns": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        "whole heads turn": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
}


def save_released(
    directory: Path, whole: Any, vision: str, shard_size: str | None, unused: dict[str, torch.Tensor]
) -> None:
    """Save a model of text and images, where text and `vision` have tensors under names of their own.

    Without `shard_size` all is one file, to which tensors are added that nothing here reads.
    """
    randomise(whole)
    whole.save_pretrained(directory, **({"max_shard_size": shard_size} if shard_size else {}))
    names = [name for file in directory.glob("*.safetensors") for name in load_file(file)]
    assert any(name.startswith("model.language_model.layers.") for name in names)
    assert any(name.startswith(vision) for name in names)
    if shard_size is None:
        add_tensors(directory, unused)
    else:
        assert len(list(directory.glob("*.safetensors"))) > 1


def add_tensors(directory: Path, added: dict[str, torch.Tensor]) -> None:
    """Put more tensors in the one file of a model."""
    path = directory / "model.safetensors"
    save_file({**load_file(path), **added}, path)
