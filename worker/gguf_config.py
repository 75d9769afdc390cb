"""GGUF metadata in the words of a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any

import numpy
from gguf.constants import GGMLQuantizationType

from worker.gguf_file import GgufFile
from worker.model_error import ModelError

# GGUF key without its architecture prefix -> field of config.json.
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "rope.freq_base": "rope_theta",
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def config_fields(file: GgufFile) -> dict[str, Any]:
    """What the `config.json` of this model says. Raises `ModelError` naming a key that it has no words for."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"general.architecture: {architecture!r} is not one of {', '.join(_ARCHITECTURES)}")
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError("split.count: a model in several GGUF files is not implemented, merge them")
    fields: dict[str, Any] = {"model_type": architecture}
    for key, field in _FIELDS.items():
        value = metadata.get(f"{architecture}.{key}")
        if isinstance(value, float):
            value = _shortest(value)
        elif value is not None and not isinstance(value, int):
            raise ModelError(f"{architecture}.{key}: must be one number for all layers")
        fields[field] = value
    _check_head_dims(file, architecture, fields)
    fields["rope_scaling"] = _rope_scaling(file, architecture)
    # What config.json states, a GGUF file shows by the tensors it has.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: no tensor token_embd.weight")
    fields["vocab_size"] = embedding.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    fields["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    fields["use_sliding_window"] = fields["sliding_window"] is not None
    return fields


def _check_head_dims(file: GgufFile, architecture: str, fields: dict[str, Any]) -> None:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not hidden or not heads:
        raise ModelError(f"{architecture}.embedding_length and {architecture}.attention.head_count are needed")
    head_dim = fields["head_dim"] = fields["head_dim"] or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.metadata.get(f"{architecture}.{key}", head_dim)
        if size != head_dim:
            raise ModelError(f"{architecture}.{key}: {size} is not the head dimension {head_dim}")


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """llama.cpp writes the scaling of Llama 3 as a tensor of divisors and the others as a type and a factor.

    A factor alone means linear, and `scale_linear` is the older key for it.
    """
    metadata = file.metadata
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear"))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "linear" if factor else "none")
    if kind != "none" and (kind, factor) != ("linear", 1.0):
        return {"rope_type": kind, "factor": factor}
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.kind is not GGMLQuantizationType.F32 or len(tensor.shape) != 1:
        raise ModelError(f"{file.path}: rope_freqs.weight must be one row of F32")
    divisors = numpy.frombuffer(file.map, "<f4", offset=tensor.start, count=tensor.shape[0]).tolist()
    return {"rope_type": "divisors", "divisors": divisors}


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05 for the 9.999999747378752e-06 that it widens to."""
    return float(str(numpy.float32(value)))
