"""Small random models made by `transformers`, and GGUF files of them in the layout that llama.cpp writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# The head dimension is not hidden / heads, and no two sizes are equal, so that a mix-up cannot go unseen.
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    # Ten times the usual: attention is peaked, so that a wrong position or mask moves the logits.
    "initializer_range": 0.2,
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
# Layers of two kinds, and sizes of each kind that no other has.
_MIXED_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 4,  # the last one attends
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gemma4": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 9,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
}
_CLASSES |= {
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of one of `FAMILIES`, or of "qwen3_5" or "gemma4"; `changes` override fields of its config.

    Norms, biases and scalars are random too: ones and zeros would hide a tensor that is left out.
    """
    config_class, model_class = _CLASSES[family]
    # Qwen2 has no head_dim of its own: transformers derives it.
    shape = {name: value for name, value in _SHAPE.items() if family != "qwen2" or name != "head_dim"}
    special = _MIXED_SHAPES.get(family, {"sliding_window": None})
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **special, **changes}))
    randomise(model)
    return model.to(dtype).eval()


def randomise(model: Any) -> None:
    """Make norms, biases and other vectors of a model random."""
    scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for buffer in scalars:
            buffer.copy_(0.7 + 0.2 * torch.rand_like(buffer))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + name.endswith("norm.weight"))


def save_tiny(directory: Path, family: str, *, shard_size: str | None = None, **options: Any) -> Any:
    """Save a model of `make_tiny` as a Hugging Face directory, in shards if `shard_size` is given; return it."""
    model = make_tiny(family, **options)
    model.save_pretrained(directory, **({"max_shard_size": shard_size} if shard_size else {}))
    return model


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Encode = Callable[[str, torch.Tensor], tuple[Any, gguf.GGMLQuantizationType | None]]


def as_float32(_name: str, tensor: torch.Tensor) -> tuple[Any, None]:
    """Encode a tensor as it is."""
    return tensor.float().numpy(), None


def write_gguf(
    path: Path,
    model: Any,
    *,
    encode: Encode = as_float32,
    metadata: Mapping[str, float | str] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write `model` as GGUF. `metadata` adds or replaces keys, `extra` adds tensors under their GGUF names."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{architecture}.rope.dimension_count": head_dim,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    # Arrays of several types, for readers to step over.
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [float(index) for index in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.token_type", [1] * config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            tensor = interleaved(tensor, heads[projection])
        data, kind = encode(name, tensor)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp orders them: row i and row i + head_dim / 2 of a head become neighbours."""
    head_dim = tensor.shape[0] // heads
    order = []
    for head in range(heads):
        for index in range(head_dim // 2):
            order += [head * head_dim + index, head * head_dim + index + head_dim // 2]
    return tensor[order].contiguous()


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"
