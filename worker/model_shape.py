"""The shape of a model: of the whole, and of what each layer asks of whoever holds keys, values and states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Architecture = Literal["llama", "qwen2", "qwen3", "qwen3_5", "gemma4"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained on.

    `linear` divides all by `factor`. `llama3` divides low ones by `factor`, keeps high ones, and blends between
    wavelengths of `original_max_position_embeddings` over `low_freq_factor` and over `high_freq_factor`.
    `divisors` divides each by its own: a GGUF file holds the outcome of `llama3`, not its parameters.
    """

    kind: Literal["linear", "llama3", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    divisors: tuple[float, ...] = ()  # head_dim / 2 of them


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a layer's heads.

    The first `pairs` of a head's head_dim / 2 pairs (i, i + head_dim / 2) turn, pair i by theta ** (-2 * i / span)
    a position before scaling; the others stand still.
    """

    head_dim: int
    theta: float
    pairs: int
    span: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer that attends to keys and values. Scores are divided by the root of `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    """How many tokens a row attends to, its own the last of them; None for all."""
    shares_kv_with: int | None = None
    """An earlier layer whose keys and values this one reads. It has none of its own: its rows hold queries only."""

    @property
    def parts(self) -> int:
        """Heads in a row of this layer's qkv."""
        return self.num_heads + (2 * self.num_kv_heads if self.shares_kv_with is None else 0)


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A gated delta net layer: a causal convolution, then one matrix [k_dim, v_dim] of state for each value head.

    Query and key head i serves the v_heads / k_heads value heads from i * v_heads / k_heads on.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # of the convolution, the row's own input the last of them

    @property
    def channels(self) -> int:
        """Inputs of the convolution in a row: all queries, then all keys, then all values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


LayerShape = AttentionLayer | DeltaLayer


@dataclass(frozen=True, slots=True)
class Gemma4Shape:
    """What only Gemma 4 has."""

    per_layer_size: int  # of the embedding that each layer adds to a row; 0 where there is none
    per_layer_vocab: int
    logit_cap: float | None
    values_are_keys: bool
    """Layers without a window use the key projection for values too."""
    wide_mlp: bool
    """Layers without keys of their own have an MLP of twice the width."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Field names follow `config.json` where it has them."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool  # of the q, k and v projections
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    sliding_window: int | None
    """Attention reaches this many tokens back, which we do not compute: serve no context longer than that.
    None where it is off or no smaller than `max_position_embeddings`, and where `layer_shapes` have windows."""
    layer_shapes: tuple[LayerShape, ...] = ()
    """One a layer where they differ; empty where all are as the fields above say."""
    gemma4: Gemma4Shape | None = None

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        if self.layer_shapes:
            return self.layer_shapes
        pairs = self.head_dim // 2
        rope = Rope(self.head_dim, self.rope_theta, pairs, self.head_dim, self.rope_scaling)
        return (AttentionLayer(self.num_heads, self.num_kv_heads, self.head_dim, rope),) * self.num_layers

    @property
    def layers_of_each_shape(self) -> int:
        """How many of the first layers hold one of every shape."""
        first: dict[LayerShape, int] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AttentionLayer) and layer.shares_kv_with is not None:
                layer = replace(layer, shares_kv_with=0)
            first.setdefault(layer, index)
        return max(first.values()) + 1
