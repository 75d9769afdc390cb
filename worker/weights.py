"""All weights of a model under their Hugging Face names, whichever files they come from, and its identity."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from worker.fingerprint import fingerprint as fingerprint
from worker.gguf_weights import GgufWeights
from worker.model_config import ModelConfig
from worker.model_error import ModelError
from worker.safetensors_weights import SafetensorsWeights

# Rotary angles that old checkpoints stored; we compute them.
_ROTARY_BUFFER = re.compile(r".*\brotary_emb\.inv_freq")
_NAMED_IN_ERRORS = 5


def weight_names(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that this model has; a projection's is (outputs, inputs)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Projection, outputs, inputs, whether it has a bias.
    projections = (
        ("self_attn.q_proj", q_width, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_width, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_width, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q_width, config.attention_out_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, outputs, inputs, has_bias in projections:
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def iter_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `weight_names(config)` once, in stored order, in memory of its own.

    Floating types come as stored, quantised ones as float32. Names and shapes are checked before the first tensor
    is read; each one is read when it is asked for. Raises `ModelError` naming tensors that are missing, unknown or
    of another shape.
    """
    source = SafetensorsWeights(path) if path.is_dir() else GgufWeights(path, config)
    expected = weight_names(config)
    _check(path, expected, {name: shape for name, shape in source.shapes.items() if not _ignored(name, config)})
    for name, tensor in _on_one_thread(source.read()):
        if name in expected:
            yield name, tensor


def _on_one_thread(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Read each with a single torch thread, and leave the consumer as many as it has.

    Copying and unpacking are bound by memory, so more threads gain nothing on a quiet machine, and their thousands
    of barriers cost seconds where another process wants a core: 0.35 s became 8 s for the 135M default model.
    """
    while True:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            item = next(tensors, None)
        finally:
            torch.set_num_threads(threads)
        if item is None:
            return
        yield item


def _ignored(name: str, config: ModelConfig) -> bool:
    # Some checkpoints store the tied head a second time.
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return tied or _ROTARY_BUFFER.fullmatch(name) is not None


def _check(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"{path}: missing {_listed(missing)}")
    if extra := [name for name in found if name not in expected]:
        raise ModelError(f"{path}: holds {_listed(extra)}, which a model of this config does not have")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{path}: {name} must be {list(shape)} and is {list(found[name])}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
