"""Gemma 4: layers with a window and layers without, of which the last read the keys and values of earlier ones.

The model holds no state: where keys and values go, and what a row attends to, is the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.activations import gelu_times, soft_cap
from worker.heads import HeadNorms
from worker.model_shape import AttentionLayer
from worker.models.decoder import Decoder
from worker.models.interface import Attend, Recur
from worker.norm import rms_norm


class Attention:
    """Projections and norms around attention; a layer without keys of its own projects queries only."""

    def __init__(self, weights: Mapping[str, Tensor], model: Gemma4Model, shape: AttentionLayer) -> None:
        stored = [name for name in ("q", "k", "v") if f"self_attn.{name}_proj.weight" in weights]
        self.qkv = model.joined(weights, *(f"self_attn.{name}_proj" for name in stored))
        self.out = model.joined(weights, "self_attn.o_proj")
        # Scores are not divided by the root of the head dimension, which `attend` does to all.
        q_norm = weights["self_attn.q_norm.weight"].float() * shape.head_dim**0.5
        k_norm = weights.get("self_attn.k_norm.weight", torch.empty(0))
        self.norms = HeadNorms(
            model.keep(q_norm, torch.float32), model.keep(k_norm, torch.float32), model.config.rms_norm_eps
        )
        self._shape = shape
        self._values_are_keys = shape.shares_kv_with is None and "v" not in stored
        self._ones = torch.ones(shape.head_dim, device=model.device)

    def __call__(self, index: int, rows: Tensor, attend: Attend) -> Tensor:
        """What this layer makes of normed `rows`."""
        shape = self._shape
        qkv = self.qkv(rows).view(len(rows), -1, shape.head_dim)
        if shape.shares_kv_with is None:
            kept = shape.num_heads + shape.num_kv_heads
            values = qkv[:, shape.num_heads :] if self._values_are_keys else qkv[:, kept:]
            qkv = torch.cat((qkv[:, :kept], rms_norm(values, self._ones, self.norms.eps)), dim=1)
        return self.out(attend(index, qkv, self.norms))


class PerLayer:
    """How one layer adds its own embedding of the token to a row."""

    def __init__(self, weights: Mapping[str, Tensor], model: Gemma4Model) -> None:
        self.gate = model.joined(weights, "per_layer_input_gate")
        self.out = model.joined(weights, "per_layer_projection")
        self.norm = model.keep(weights["post_per_layer_input_norm.weight"], torch.float32)


class Layer:
    """One decoder layer. Attention and MLP have a norm before and one after."""

    def __init__(self, index: int, weights: Mapping[str, Tensor], model: Gemma4Model) -> None:
        shape = model.config.layers[index]
        assert isinstance(shape, AttentionLayer)
        self.attention = Attention(weights, model, shape)
        self.gate = model.joined(weights, "mlp.gate_proj")
        self.up = model.joined(weights, "mlp.up_proj")
        self.down = model.joined(weights, "mlp.down_proj")
        self.per_layer = PerLayer(weights, model) if "per_layer_input_gate.weight" in weights else None
        self.norms = [
            model.keep(weights[f"{name}.weight"], torch.float32)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        ]
        self.factor = float(weights["layer_scalar"])


class Gemma4Model(Decoder[Layer]):
    """A dense decoder with layers of two kinds."""

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> Layer:
        """Layer `index` from all its tensors."""
        return Layer(index, weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm and what makes the embeddings of layers."""
        config = self.config
        assert config.gemma4 is not None
        self._shape = config.gemma4
        self.norm = self.keep(weights["model.norm.weight"], torch.float32)
        self._embedding_factor = self._rounded(config.hidden_size**0.5)
        if self._shape.per_layer_size:
            stored = weights["model.embed_tokens_per_layer.weight"]
            # Rows are only looked up in it, and it may be larger than all else: as it is stored.
            self._per_layer_embedding = self.keep(stored, stored.dtype)
            self._per_layer_factor = self._rounded(self._shape.per_layer_size**0.5)
            self._per_layer_projection = self.linear(weights["model.per_layer_model_projection.weight"])
            self._per_layer_norm = self.keep(weights["model.per_layer_projection_norm.weight"], torch.float32)

    def _rounded(self, factor: float) -> float:
        """An embedding's factor, as the type of the products has it: models are trained with that one."""
        return float(torch.tensor(factor, dtype=self.dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [rows, hidden] that the first layer starts from."""
        return super().embed(token_ids) * self._embedding_factor

    def forward(
        self, token_ids: Tensor, attend: Attend, num_layers: int | None = None, recur: Recur | None = None
    ) -> Tensor:
        """Final hidden rows, as `Model.forward` says. No layer of these recurs."""
        eps = self.config.rms_norm_eps
        x = self.embed(token_ids)
        per_layer = self._per_layer_rows(token_ids, x) if self._shape.per_layer_size else None
        for index, layer in enumerate(self.layers[:num_layers]):
            before_attention, after_attention, before_mlp, after_mlp = layer.norms
            mixed = layer.attention(index, rms_norm(x, before_attention, eps), attend)
            x = x + rms_norm(mixed, after_attention, eps)
            rows = rms_norm(x, before_mlp, eps)
            x = x + rms_norm(layer.down(gelu_times(layer.gate(rows), layer.up(rows))), after_mlp, eps)
            if layer.per_layer is not None and per_layer is not None:
                added = layer.per_layer.out(gelu_times(layer.per_layer.gate(x), per_layer[index]))
                x = x + rms_norm(added, layer.per_layer.norm, eps)
            x = x * layer.factor
        return rms_norm(x, self.norm, eps)

    def _per_layer_rows(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """What each layer adds to each row [layers, rows, per_layer_size]: from the token alone and from its row."""
        shape = (-1, self.config.num_layers, self._shape.per_layer_size)
        own = self._per_layer_embedding[token_ids].to(self.hidden_dtype) * self._per_layer_factor
        projected = self._per_layer_projection(embedded) * self.config.hidden_size**-0.5
        projected = rms_norm(projected.view(shape), self._per_layer_norm, self.config.rms_norm_eps)
        return ((projected + own.view(shape)) * 2**-0.5).transpose(0, 1).contiguous()

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of final hidden rows."""
        logits = super().logits(hidden)
        return logits if self._shape.logit_cap is None else soft_cap(logits, self._shape.logit_cap)
