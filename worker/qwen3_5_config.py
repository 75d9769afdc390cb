"""The config of Qwen3.5's dense text model: gated delta net layers, and attention in every few."""

from __future__ import annotations

from worker.config_fields import DEFAULT_ROPE_THETA, Fields
from worker.model_shape import AttentionLayer, DeltaLayer, LayerShape, ModelConfig, Rope

_HEAD_DIM = 256
_ATTENTION_EVERY = 4
_TURNED_SHARE = 0.25  # of a head, where the config does not say


def parse(read: Fields, tied: bool) -> ModelConfig:
    """The config that the fields describe. Raises `ModelError`, naming the field, for what we do not compute."""
    if read.get("hidden_act") not in (None, "silu"):
        raise read.error("hidden_act", f"{read.get('hidden_act')!r} is not implemented, only 'silu'")
    for name in ("num_experts", "mlp_only_layers"):
        if read.get(name):
            raise read.error(name, "not implemented")
    if not read.flag("attn_output_gate", True):
        raise read.error("attn_output_gate", "false is not implemented")

    heads, kv_heads = read.integer("num_attention_heads"), read.integer("num_key_value_heads")
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = read.integer("head_dim", _HEAD_DIM)
    rope = _rope(read, head_dim)
    shapes: dict[str, LayerShape] = {
        "full_attention": AttentionLayer(heads, kv_heads, head_dim, rope),
        "linear_attention": _delta_layer(read),
    }
    layer_types = _layer_types(read)
    if unknown := set(layer_types) - set(shapes):
        raise read.error("layer_types", f"{sorted(unknown)} not implemented")
    has_bias = read.flag("attention_bias")
    return ModelConfig(
        architecture="qwen3_5",
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=len(layer_types),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=None,
        attention_bias=has_bias,
        attention_out_bias=has_bias,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=tied,
        max_position_embeddings=read.integer("max_position_embeddings"),
        sliding_window=None,
        layer_shapes=tuple(shapes[kind] for kind in layer_types),
    )


def _layer_types(read: Fields) -> list[str]:
    num_layers = read.integer("num_hidden_layers")
    layer_types = read.strings("layer_types")
    if layer_types is None:
        every = read.integer("full_attention_interval", _ATTENTION_EVERY)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    if len(layer_types) != num_layers:
        raise read.error("layer_types", f"{len(layer_types)} of them, not num_hidden_layers {num_layers}")
    return layer_types


def _delta_layer(read: Fields) -> DeltaLayer:
    k_heads, v_heads = read.integer("linear_num_key_heads"), read.integer("linear_num_value_heads")
    if v_heads % k_heads:
        raise read.error("linear_num_key_heads", f"{k_heads} does not divide linear_num_value_heads {v_heads}")
    taps = read.integer("linear_conv_kernel_dim", 4)
    if taps < 2:
        raise read.error("linear_conv_kernel_dim", "1 is not implemented")
    return DeltaLayer(
        k_heads,
        v_heads,
        read.integer("linear_key_head_dim"),
        read.integer("linear_value_head_dim"),
        taps,
    )


def _rope(read: Fields, head_dim: int) -> Rope:
    # Text alone has equal positions in all three grids of an image model, so `mrope_section` changes nothing.
    rope = read.section("rope_parameters")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise rope.error("rope_type", f"{kind!r} is not implemented for this architecture")
    if read.get("rope_scaling"):
        raise read.error("rope_scaling", "not implemented for this architecture")
    theta = rope.number("rope_theta", read.number("rope_theta", DEFAULT_ROPE_THETA))
    share = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", _TURNED_SHARE))
    turned = int(head_dim * share)
    if head_dim % 2 or turned % 2 or not 0 < turned <= head_dim:
        raise rope.error("partial_rotary_factor", f"{share} of head_dim {head_dim} is no number of pairs")
    return Rope(head_dim, theta, pairs=turned // 2, span=turned)
