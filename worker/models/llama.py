"""Llama, Mistral, Qwen2 and Qwen3: dense decoders with grouped-query attention and a gated MLP.

The model holds no state: where keys and values go, and what a row attends to, is the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.heads import HeadNorms
from worker.model_error import ModelError
from worker.models.decoder import Decoder
from worker.models.interface import Attend as Attend
from worker.models.interface import Recur
from worker.norm import rms_norm
from worker.product_ops import GROUP
from worker.rope import Rotary
from worker.vectors import HAS_PAIRS, HAS_WIDE

_MOST_TWICE = 2 << 30  # bytes of float32 layers that are held in two layouts, for decode and for prefill


class Layer:
    """The weights of one decoder layer; q, k and v are joined into one product."""

    def __init__(self, weights: Mapping[str, Tensor], model: LlamaModel) -> None:
        dtype = model.hidden_dtype
        self.qkv = model.joined(weights, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = model.joined(weights, "self_attn.o_proj")
        self.gate = model.joined(weights, "mlp.gate_proj")
        self.up = model.joined(weights, "mlp.up_proj")
        self.down = model.joined(weights, "mlp.down_proj")
        self.input_norm = model.keep(weights["input_layernorm.weight"], dtype)
        self.post_norm = model.keep(weights["post_attention_layernorm.weight"], dtype)
        self.head_norms: HeadNorms | None = None
        if model.config.qk_norm:
            q_norm = model.keep(weights["self_attn.q_norm.weight"], dtype)
            k_norm = model.keep(weights["self_attn.k_norm.weight"], dtype)
            self.head_norms = HeadNorms(q_norm, k_norm, model.config.rms_norm_eps)


class LlamaModel(Decoder[Layer]):
    """A dense decoder whose layers are all alike."""

    @property
    def rotary(self) -> Rotary:
        """That of every layer."""
        (rotary,) = self.rotaries.values()
        return rotary

    @property
    def in_tiles(self) -> bool:
        """As `whole_step.py` has it: biases of the query, key and value products only, and all of one kind."""
        config = self.config
        plain = not (config.attention_out_bias or config.mlp_bias)
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        mixed = config.num_heads * config.head_dim
        shapes = (heads, mixed, config.hidden_size, config.intermediate_size)
        if self.device.type != "cpu" or not plain or any(size % GROUP for size in shapes):
            return False
        if self.packed:
            return HAS_PAIRS
        weights = config.hidden_size * (heads + mixed + 3 * config.intermediate_size) * config.num_layers
        return HAS_WIDE and self.dtype == torch.float32 and 4 * weights <= _MOST_TWICE

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> Layer:
        """Layer `index` from all its tensors. Raises `ModelError` for a config of another family."""
        if self.config.layer_shapes:
            raise ModelError(f"model_type: {self.config.architecture} is not of the Llama family")
        return Layer(weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm."""
        self.norm = self.keep(weights["model.norm.weight"], self.hidden_dtype)

    def forward(
        self, token_ids: Tensor, attend: Attend, num_layers: int | None = None, recur: Recur | None = None
    ) -> Tensor:
        """Final hidden rows, as `Model.forward` says. No layer of these recurs."""
        config = self.config
        eps = config.rms_norm_eps
        shape = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        x = self.embed(token_ids)
        for index, layer in enumerate(self.layers[:num_layers]):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, eps, self.dtype)).view(shape)
            x = layer.out.plus(attend(index, qkv, layer.head_norms), x)
            rows = rms_norm(x, layer.post_norm, eps, self.dtype)
            x = layer.down.plus(layer.up.times(rows, layer.gate.silu(rows)), x)
        return rms_norm(x, self.norm, eps)
