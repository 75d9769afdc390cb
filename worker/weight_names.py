"""Which tensors a model of a config has, under the names of a Hugging Face checkpoint of text alone."""

from __future__ import annotations

from worker.model_shape import AttentionLayer, DeltaLayer, LayerShape, ModelConfig

LAYER_PREFIX = "model.layers."


def weight_names(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that this model has; a projection's is (outputs, inputs)."""
    hidden, gemma4 = config.hidden_size, config.gemma4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index, layer in enumerate(config.layers):
        mixer = _attention(config, layer) if isinstance(layer, AttentionLayer) else _delta_net(config, layer)
        for name, shape in {**_rest_of_layer(config, layer), **mixer}.items():
            shapes[f"{LAYER_PREFIX}{index}.{name}"] = shape
    if gemma4 is not None and gemma4.per_layer_size:
        all_layers = config.num_layers * gemma4.per_layer_size
        shapes["model.embed_tokens_per_layer.weight"] = (gemma4.per_layer_vocab, all_layers)
        shapes["model.per_layer_model_projection.weight"] = (all_layers, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (gemma4.per_layer_size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _attention(config: ModelConfig, layer: AttentionLayer) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    q_width, kv_width = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    gated = config.architecture == "qwen3_5"  # queries and gates come from one projection
    # Projection, outputs, inputs, whether it has a bias.
    projections = [("q_proj", q_width * (1 + gated), hidden, config.attention_bias)]
    norms = ["q_norm"]
    if layer.shares_kv_with is None:
        projections.append(("k_proj", kv_width, hidden, config.attention_bias))
        norms.append("k_norm")
        if not (config.gemma4 and config.gemma4.values_are_keys and layer.window is None):
            projections.append(("v_proj", kv_width, hidden, config.attention_bias))
    projections.append(("o_proj", hidden, q_width, config.attention_out_bias))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, outputs, inputs, has_bias in projections:
        shapes.update(_projection(f"self_attn.{name}", outputs, inputs, has_bias))
    if config.qk_norm:
        shapes.update({f"self_attn.{name}.weight": (layer.head_dim,) for name in norms})
    return shapes


def _delta_net(config: ModelConfig, layer: DeltaLayer) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, layer.v_heads * layer.v_dim
    return {
        "linear_attn.in_proj_qkv.weight": (layer.channels, hidden),
        "linear_attn.in_proj_z.weight": (width, hidden),
        "linear_attn.in_proj_a.weight": (layer.v_heads, hidden),
        "linear_attn.in_proj_b.weight": (layer.v_heads, hidden),
        "linear_attn.conv1d.weight": (layer.channels, 1, layer.taps),
        "linear_attn.A_log": (layer.v_heads,),
        "linear_attn.dt_bias": (layer.v_heads,),
        "linear_attn.norm.weight": (layer.v_dim,),
        "linear_attn.out_proj.weight": (hidden, width),
    }


def _rest_of_layer(config: ModelConfig, layer: LayerShape) -> dict[str, tuple[int, ...]]:
    """MLP and norms, and what Gemma 4 has besides."""
    hidden, inner, gemma4 = config.hidden_size, config.intermediate_size, config.gemma4
    shares = isinstance(layer, AttentionLayer) and layer.shares_kv_with is not None
    if gemma4 is not None and gemma4.wide_mlp and shares:
        inner *= 2
    norms = ["input_layernorm", "post_attention_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {}
    if gemma4 is not None:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes["layer_scalar"] = (1,)
        if gemma4.per_layer_size:
            norms.append("post_per_layer_input_norm")
            shapes["per_layer_input_gate.weight"] = (gemma4.per_layer_size, hidden)
            shapes["per_layer_projection.weight"] = (hidden, gemma4.per_layer_size)
    shapes.update({f"{norm}.weight": (hidden,) for norm in norms})
    shapes.update(_projection("mlp.gate_proj", inner, hidden, config.mlp_bias))
    shapes.update(_projection("mlp.up_proj", inner, hidden, config.mlp_bias))
    shapes.update(_projection("mlp.down_proj", hidden, inner, config.mlp_bias))
    return shapes


def _projection(name: str, outputs: int, inputs: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return {**weight, f"{name}.bias": (outputs,)} if has_bias else weight
