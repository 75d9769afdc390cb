"""The config of Gemma 4's dense text model: layers with a window, and some that see everything with larger heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.config_fields import DEFAULT_ROPE_THETA, Fields
from worker.model_error import ModelError
from worker.model_shape import AttentionLayer, Gemma4Shape, ModelConfig, Rope, RopeScaling

# What transformers fills in where a config leaves a field out.
_GLOBAL_EVERY = 6
_HEAD_DIM, _GLOBAL_HEAD_DIM = 256, 512
_WINDOW = 512
_GLOBAL_THETA, _GLOBAL_TURNED_SHARE = 1_000_000.0, 0.25
_PER_LAYER_SIZE, _PER_LAYER_VOCAB = 256, 262_144

_SLIDING, _GLOBAL = "sliding_attention", "full_attention"


def parse(read: Fields, tied: bool) -> ModelConfig:
    """The config that the fields describe. Raises `ModelError`, naming the field, for what we do not compute."""
    activation = read.get("hidden_activation")
    if activation not in (None, "gelu_pytorch_tanh"):
        raise read.error("hidden_activation", f"{activation!r} is not implemented, only 'gelu_pytorch_tanh'")
    if read.flag("enable_moe_block"):
        raise read.error("enable_moe_block", "not implemented")
    if read.get("use_bidirectional_attention") == "all":
        raise read.error(
            "use_bidirectional_attention", "'all' is not implemented, answers are made token by token"
        )

    layers = _layers(read)
    vocab_size = read.integer("vocab_size")
    has_bias = read.flag("attention_bias")
    per_layer_size = _PER_LAYER_SIZE
    if read.get("hidden_size_per_layer_input") is not None:
        per_layer_size = read.count("hidden_size_per_layer_input")
    per_layer_vocab = read.integer("vocab_size_per_layer_input", _PER_LAYER_VOCAB)
    if per_layer_size and per_layer_vocab < vocab_size:
        raise read.error("vocab_size_per_layer_input", f"{per_layer_vocab} is less than vocab_size {vocab_size}")
    capped = read.get("final_logit_softcapping") is not None
    return ModelConfig(
        architecture="gemma4",
        vocab_size=vocab_size,
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=layers[0].rope.theta,
        rope_scaling=None,
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=tied,
        max_position_embeddings=read.integer("max_position_embeddings"),
        sliding_window=None,
        layer_shapes=layers,
        gemma4=Gemma4Shape(
            per_layer_size=per_layer_size,
            per_layer_vocab=per_layer_vocab,
            logit_cap=read.number("final_logit_softcapping") if capped else None,
            values_are_keys=read.flag("attention_k_eq_v"),
            wide_mlp=read.flag("use_double_wide_mlp"),
        ),
    )


def _layers(read: Fields) -> tuple[AttentionLayer, ...]:
    kinds = _layer_types(read)
    num_heads = read.integer("num_attention_heads")
    first_sharing = len(kinds) - read.count("num_kv_shared_layers")
    layers: list[AttentionLayer] = []
    for index, kind in enumerate(kinds):
        head_dim, kv_heads = _heads(read, index, kind)
        if num_heads % kv_heads:
            raise read.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {num_heads}")
        shares_with = None
        if index >= first_sharing:
            shares_with = _last(kinds[: max(first_sharing, 0)], kind)
            if shares_with is None:
                raise read.error("num_kv_shared_layers", f"no layer of {kind} is left to keep keys and values")
            kept = layers[shares_with]
            if (kept.head_dim, kept.num_kv_heads) != (head_dim, kv_heads):
                raise read.error("per_layer_config", f"layers {shares_with} and {index} share keys and differ")
        window = read.integer("sliding_window", _WINDOW) if kind == _SLIDING else None
        rope = _rope(read, kind, head_dim)
        layers.append(AttentionLayer(num_heads, kv_heads, head_dim, rope, window, shares_with))
    return tuple(layers)


def _layer_types(read: Fields) -> Sequence[str]:
    num_layers = read.integer("num_hidden_layers")
    kinds = read.strings("layer_types")
    if kinds is None:
        kinds = [_SLIDING if (i + 1) % _GLOBAL_EVERY else _GLOBAL for i in range(num_layers)]
        kinds[-1] = _GLOBAL
    if len(kinds) != num_layers:
        raise read.error("layer_types", f"{len(kinds)} of them, not num_hidden_layers {num_layers}")
    if unknown := set(kinds) - {_SLIDING, _GLOBAL}:
        raise read.error("layer_types", f"{sorted(unknown)} not implemented")
    if kinds[-1] != _GLOBAL:
        raise read.error("layer_types", f"the last one must be {_GLOBAL}")
    return kinds


def _last(kinds: Sequence[str], kind: str) -> int | None:
    found = [index for index, each in enumerate(kinds) if each == kind]
    return found[-1] if found else None


def _heads(read: Fields, index: int, kind: str) -> tuple[int, int]:
    """Head dimension and KV heads of a layer.

    Configs state those of global layers in fields of their own, or, once transformers has saved them, layer by layer.
    """
    head_dim = read.integer("head_dim", _HEAD_DIM)
    kv_heads = read.integer("num_key_value_heads")
    if read.get("per_layer_config") is not None:
        own = read.section("per_layer_config").section(str(index))
        if unknown := set(own) - {"head_dim", "num_key_value_heads"}:
            raise own.error(sorted(unknown)[0], "not implemented")
        head_dim, kv_heads = own.integer("head_dim", head_dim), own.integer("num_key_value_heads", kv_heads)
    elif kind == _GLOBAL:
        head_dim = read.integer("global_head_dim", _GLOBAL_HEAD_DIM)
        if read.flag("attention_k_eq_v"):
            kv_heads = read.integer("num_global_key_value_heads", kv_heads)
    if head_dim % 2:
        raise read.error("head_dim", f"{head_dim} is odd, rotary positions need pairs")
    return head_dim, kv_heads


def _rope(read: Fields, kind: str, head_dim: int) -> Rope:
    if read.get("rope_parameters") is None:
        if kind == _SLIDING:
            return Rope(head_dim, DEFAULT_ROPE_THETA, head_dim // 2, head_dim)
        return Rope(head_dim, _GLOBAL_THETA, int(_GLOBAL_TURNED_SHARE * head_dim // 2), head_dim)
    if not isinstance(read.section("rope_parameters").get(kind), Mapping):
        raise ModelError(f"rope_parameters.{kind}: missing")
    rope = read.section("rope_parameters").section(kind)
    theta = rope.number("rope_theta", DEFAULT_ROPE_THETA)
    share = rope.number("partial_rotary_factor", 1.0)
    match rope.get("rope_type") or "default":
        case "default" if share == 1.0:
            return Rope(head_dim, theta, head_dim // 2, head_dim)
        case "proportional" if share <= 1.0:
            factor = rope.number("factor", 1.0)
            scaling = None if factor == 1.0 else RopeScaling("linear", factor=factor)
            return Rope(head_dim, theta, int(share * head_dim // 2), head_dim, scaling)
        case "default" | "proportional":
            raise rope.error("partial_rotary_factor", f"{share} is not implemented")
        case other:
            raise rope.error("rope_type", f"{other!r} is not implemented")
