"""Gemma 4 as the CUDA backend runs it: windows, heads of two sizes, and layers that read earlier ones' keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.activations import soft_cap
from worker.cuda.decoder import CudaDecoder
from worker.cuda.mixed_ops import MixedOps, States
from worker.cuda.ops import Ops, Places, at_their_rows, last_rows
from worker.heads import HeadNorms
from worker.model_shape import AttentionLayer, ModelConfig, Rope


def is_served(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether this backend computes such a model: the others run layer by layer in torch."""
    sizes = {layer.head_dim for layer in config.layers if isinstance(layer, AttentionLayer)}
    return (
        config.architecture == "gemma4"
        and not (config.attention_bias or config.attention_out_bias or config.mlp_bias)
        and dtype in (torch.bfloat16, torch.float16)
        and all(size & (size - 1) == 0 and 16 <= size <= 512 for size in sizes)
    )


class SlidingLayer:
    """The weights of one layer. `qkv` holds queries, and keys and values where the layer keeps its own."""

    def __init__(self, index: int, weights: Mapping[str, Tensor], model: SlidingModel) -> None:
        shape = model.config.layers[index]
        assert isinstance(shape, AttentionLayer)
        self.shape = shape
        self.stores = shape.shares_kv_with is None
        # A layer without a projection for values takes that of keys, not turned and with a norm of its own.
        value = "v" if "self_attn.v_proj.weight" in weights else "k"
        stored = ("q", "k", value) if self.stores else ("q",)
        self.qkv = model.stacked(weights, *(f"self_attn.{name}_proj.weight" for name in stored))
        self.out = model.stacked(weights, "self_attn.o_proj.weight")
        # Scores are not divided by the root of the head dimension, which attention does to all.
        q_norm = model.wide(weights["self_attn.q_norm.weight"].float() * shape.head_dim**0.5)
        k_norm = model.wide(weights["self_attn.k_norm.weight"]) if self.stores else q_norm
        self.head_norms = HeadNorms(q_norm, k_norm, model.config.rms_norm_eps)
        self.gate_up = model.stacked(weights, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = model.stacked(weights, "mlp.down_proj.weight")
        self.inner = len(self.gate_up) // 2
        self.input_norm = model.wide(weights["input_layernorm.weight"])
        self.after_attention = model.wide(weights["post_attention_layernorm.weight"])
        self.before_mlp = model.wide(weights["pre_feedforward_layernorm.weight"])
        self.after_mlp = model.wide(weights["post_feedforward_layernorm.weight"])
        self.factor = float(weights["layer_scalar"])
        self.has_own_rows = "per_layer_input_gate.weight" in weights
        if self.has_own_rows:
            self.own_gate = model.stacked(weights, "per_layer_input_gate.weight")
            self.own_out = model.stacked(weights, "per_layer_projection.weight")
            self.own_norm = model.wide(weights["post_per_layer_input_norm.weight"])


class SlidingModel(CudaDecoder[SlidingLayer]):
    """A dense decoder with layers of two kinds. `pools` are one a layer: of one that shares, the pool it reads."""

    def products(self) -> list[Tensor]:
        """Those of one layer of each kind, and what is computed once for all layers."""
        kinds = {(layer.shape.window, layer.stores): layer for layer in self.layers}
        found = [m for layer in kinds.values() for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        if self._shape.per_layer_size:
            found += [self.layers[0].own_gate, self.layers[0].own_out, self._own_projection]
        return found

    def wide(self, tensor: Tensor) -> Tensor:
        """A tensor kept in float32."""
        return self.keep(tensor, torch.float32)

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> SlidingLayer:
        """Layer `index` from all its tensors."""
        return SlidingLayer(index, weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm and what makes the embeddings of layers."""
        config = self.config
        assert config.gemma4 is not None
        self._shape = config.gemma4
        self.norm = self.wide(weights["model.norm.weight"])
        self._factor = self._rounded(config.hidden_size**0.5)
        if self._shape.per_layer_size:
            stored = weights["model.embed_tokens_per_layer.weight"]
            self._own_embedding = self.keep(stored, stored.dtype)
            self._own_factor = self._rounded(self._shape.per_layer_size**0.5)
            self._own_projection = self.stacked(weights, "model.per_layer_model_projection.weight")
            self._own_norm = self.wide(weights["model.per_layer_projection_norm.weight"])

    def _rounded(self, factor: float) -> float:
        """An embedding's factor, as the type of the products has it: models are trained with that one."""
        return float(torch.tensor(factor, dtype=self.dtype))

    def prefill(
        self,
        token_ids: Tensor,
        ops: MixedOps,
        places: Mapping[Rope, Places],
        pools: list[Tensor],
        longest: int,
        few: int,
        states: States | None,
    ) -> Tensor:
        """As `DenseModel.prefill`."""
        eps, count = self.config.rms_norm_eps, len(token_ids)
        rows_at: Tensor | None = None
        x, own = self._start(token_ids, ops, few=False)
        rows = ops.norm(x, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, pool, norm) in enumerate(zip(self.layers, pools, following, strict=True)):
            q, where = (
                self._queries(ops.product(rows, layer.qkv), layer, ops, places, pool),
                places[layer.shape.rope],
            )
            if layer is self.layers[-1] and count > few:
                rows_at, where = last_rows(where, few)
                q, x, own = q[rows_at], x[rows_at], None if own is None else own[rows_at]
            mixed = ops.attend_prefill(q, where, pool, longest, layer.shape.window)
            rows = ops.join_norm(x, ops.product(mixed, layer.out), layer.after_attention, layer.before_mlp, eps)
            both = ops.product(rows, layer.gate_up)
            added = ops.product(ops.gelu_gate(both[:, : layer.inner], both[:, layer.inner :]), layer.down)
            if own is not None:
                ops.join(x, added, layer.after_mlp, eps)
                inner = ops.gelu_gate(ops.product(x, layer.own_gate), own[:, index])
                rows = ops.join_norm(x, ops.product(inner, layer.own_out), layer.own_norm, norm, eps, layer.factor)
            else:
                rows = ops.join_norm(x, added, layer.after_mlp, norm, eps, layer.factor)
        return rows if rows_at is None else at_their_rows(rows, rows_at, count)

    def decode(
        self,
        token_ids: Tensor,
        ops: MixedOps,
        places: Mapping[Rope, Places],
        pools: list[Tensor],
        longest: int,
        states: States | None,
    ) -> Tensor:
        """Float32 logits of one token a sequence."""
        eps = self.config.rms_norm_eps
        x, own = self._start(token_ids, ops, few=True)
        rows = ops.norm(x, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, pool, norm) in enumerate(zip(self.layers, pools, following, strict=True)):
            q = self._queries(ops.skinny(rows, layer.qkv), layer, ops, places, pool)
            mixed = ops.attend_decode(q, places[layer.shape.rope], pool, longest, layer.shape.window)
            rows = ops.join_norm(x, ops.skinny(mixed, layer.out), layer.after_attention, layer.before_mlp, eps)
            both = ops.skinny(rows, layer.gate_up)
            added = ops.skinny(ops.gelu_gate(both[:, : layer.inner], both[:, layer.inner :]), layer.down)
            if own is not None:
                ops.join(x, added, layer.after_mlp, eps)
                inner = ops.gelu_gate(ops.skinny(x, layer.own_gate), own[:, index])
                rows = ops.join_norm(x, ops.skinny(inner, layer.own_out), layer.own_norm, norm, eps, layer.factor)
            else:
                rows = ops.join_norm(x, added, layer.after_mlp, norm, eps, layer.factor)
        return self.few_logits(rows, ops)

    def few_logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """Float32 logits [rows, vocab] of a few final hidden rows."""
        logits = super().few_logits(hidden, ops)
        return logits if self._shape.logit_cap is None else soft_cap(logits, self._shape.logit_cap)

    def _queries(
        self, qkv: Tensor, layer: SlidingLayer, ops: MixedOps, places: Mapping[Rope, Places], pool: Tensor
    ) -> Tensor:
        """Rows of queries; keys and values, where there are any, to the pool."""
        where = places[layer.shape.rope]
        return ops.turn_and_store(
            qkv, None, layer.head_norms, where, pool, stores=layer.stores, norm_values=layer.stores
        )

    def _start(self, token_ids: Tensor, ops: MixedOps, few: bool) -> tuple[Tensor, Tensor | None]:
        """Rows that the first layer starts from, and what each layer adds to each row [rows, layers, size]."""
        config, size = self.config, self._shape.per_layer_size
        x = self.embedding[token_ids] * self._factor
        if not size:
            return x, None
        shape = (-1, config.num_layers, size)
        own = self._own_embedding[token_ids].to(x.dtype) * self._own_factor
        product = ops.skinny if few else ops.product
        projected = (product(x, self._own_projection) * config.hidden_size**-0.5).view(-1, size)
        projected = ops.norm(projected, self._own_norm, config.rms_norm_eps)
        return x, (projected.view(shape) + own.view(shape)) * 2**-0.5
