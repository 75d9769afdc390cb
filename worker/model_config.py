"""What a model is made of, read from `config.json` or from GGUF metadata; what we cannot compute is refused here.

Both sources are brought to the field names of `config.json` and then checked once. Dense families are read here,
the others in a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker import gemma4_config, qwen3_5_config
from worker.config_fields import DEFAULT_ROPE_THETA, Fields
from worker.gguf_config import config_fields
from worker.gguf_file import GgufFile
from worker.model_error import ModelError as ModelError
from worker.model_shape import Architecture
from worker.model_shape import ModelConfig as ModelConfig
from worker.model_shape import RopeScaling as RopeScaling

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "mistral": "llama",  # differs from Llama in its sliding window only
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# A model of text and images says the first name, with a text_config inside; its text part alone the second.
_IN_OWN_FILE: dict[str, Callable[[Fields, bool], ModelConfig]] = {
    "qwen3_5": qwen3_5_config.parse,
    "qwen3_5_text": qwen3_5_config.parse,
    "gemma4": gemma4_config.parse,
    "gemma4_text": gemma4_config.parse,
}
# Values that transformers fills in when a config leaves the field out, where they depend on the family.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


def load_config(path: Path) -> ModelConfig:
    """The config of a Hugging Face directory or a GGUF file.

    Raises `ModelError`, naming the field, for a model that we would compute wrongly or not at all.
    """
    if path.is_dir():
        return parse_config(_read_json(path / "config.json"))
    if path.is_file():
        return parse_config(config_fields(GgufFile(path)))
    raise ModelError(f"{path}: no such model file or directory")


def parse_config(fields: Mapping[str, Any]) -> ModelConfig:
    """The config that the fields of a `config.json` describe. Raises `ModelError` as `load_config` does."""
    read = Fields(fields)
    model_type = read.text("model_type")
    if parse := _IN_OWN_FILE.get(model_type):
        return _parse_text_part(read, parse)
    architecture = _ARCHITECTURES.get(model_type)
    if architecture is None:
        raise ModelError(f"model_type: {model_type!r} is not one of {', '.join([*_ARCHITECTURES, *_IN_OWN_FILE])}")
    _refuse_unimplemented(read)

    num_layers = read.integer("num_hidden_layers")
    hidden_size = read.integer("hidden_size")
    num_heads = read.integer("num_attention_heads")
    # Configs older than grouped-query attention do not have the field.
    num_kv_heads = read.integer("num_key_value_heads", num_heads if model_type == "llama" else None)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = read.integer("head_dim", _QWEN3_HEAD_DIM if model_type == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim: {head_dim} is odd, rotary positions need pairs")

    max_positions = read.integer("max_position_embeddings")
    window = _sliding_window(read, model_type, num_layers)
    rope_theta, rope_scaling = _rope(read, head_dim)
    has_bias = model_type in ("llama", "qwen3") and read.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=has_bias or model_type == "qwen2",
        attention_out_bias=has_bias,
        mlp_bias=model_type == "llama" and read.flag("mlp_bias"),
        qk_norm=model_type == "qwen3",
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        max_position_embeddings=max_positions,
        sliding_window=window if window is not None and window < max_positions else None,
    )


def _parse_text_part(read: Fields, parse: Callable[[Fields, bool], ModelConfig]) -> ModelConfig:
    """The text part of a model that may see and hear too."""
    text = read.section("text_config") if "text_config" in read else read
    for part in (read, text):
        _refuse_quantized(part)
    tied = read if "tie_word_embeddings" in read else text
    return parse(text, tied.flag("tie_word_embeddings", parse is gemma4_config.parse))


def _refuse_unimplemented(read: Fields) -> None:
    if read.get("hidden_act") not in (None, "silu"):
        raise ModelError(f"hidden_act: {read.get('hidden_act')!r} is not implemented, only 'silu'")
    _refuse_quantized(read)
    for name in ("num_local_experts", "num_experts"):
        if read.get(name):
            raise ModelError(f"{name}: not implemented")
    for section in (read, read.section("rope_parameters"), read.section("rope_scaling")):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor: not implemented, rotary positions cover whole heads")


def _refuse_quantized(read: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if read.get(name):
            method = read.section(name).get("quant_method")
            raise read.error(name, "not implemented" + (f" (quant_method {method!r})" if method else ""))


def _sliding_window(read: Fields, model_type: str, num_layers: int) -> int | None:
    """The window of those layers that have one; None where no layer does."""
    if model_type == "mistral":
        if "sliding_window" not in read:
            return _MISTRAL_WINDOW
    elif model_type == "llama" or not read.flag("use_sliding_window"):
        return None
    elif layer_types := read.get("layer_types"):
        if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
            raise ModelError(f"layer_types: {sorted(unknown)} not implemented")
        if "sliding_attention" not in layer_types:
            return None
    elif (read.get("max_window_layers") or 0) >= num_layers:  # the first ones are without
        return None
    return None if read.get("sliding_window") is None else read.integer("sliding_window")


def _rope(read: Fields, head_dim: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    name = "rope_scaling" if read.get("rope_scaling") else "rope_parameters"
    rope = read.section(name)
    if nested := [key for key in rope if isinstance(rope.get(key), Mapping)]:
        raise ModelError(f"{name}.{nested[0]}: not implemented, all layers have the same rotary positions")
    theta = rope.number("rope_theta", read.number("rope_theta", DEFAULT_ROPE_THETA))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", factor=rope.number("factor"))
        case "llama3":
            scaling = RopeScaling(
                "llama3",
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ModelError(f"{name}.high_freq_factor: must be above low_freq_factor")
            return theta, scaling
        case "divisors":
            divisors = tuple(rope.get("divisors") or ())
            if len(divisors) != head_dim // 2:
                raise ModelError(f"{name}.divisors: {len(divisors)} of them, not {head_dim // 2}")
            return theta, RopeScaling("divisors", divisors=divisors)
    raise ModelError(f"{name}.rope_type: {kind!r} is not implemented")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: not an object")
    return fields
