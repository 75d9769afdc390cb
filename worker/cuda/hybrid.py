"""Qwen3.5 as the CUDA backend runs it: one product before each recurrence or attention, its gates among the outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.cuda.decoder import CudaDecoder
from worker.cuda.mixed_ops import DeltaNet, MixedOps, States
from worker.cuda.ops import Places, at_their_rows, last_rows
from worker.delta_rule import DeltaWeights
from worker.heads import HeadNorms
from worker.model_shape import AttentionLayer, DeltaLayer, ModelConfig, Rope
from worker.models.qwen3_5 import arranged_heads
from worker.recurrent import StateLayout

_HEADS = (16, 32, 64, 128, 256)
_DELTA_HEADS = (64, 128)  # Triton 3.6 makes wrong code of products over 16 dimensions on an H100


def is_served(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether this backend computes such a hybrid: the others run layer by layer in torch."""
    delta = {layer for layer in config.layers if isinstance(layer, DeltaLayer)}
    attention = {layer for layer in config.layers if isinstance(layer, AttentionLayer)}
    return (
        config.architecture == "qwen3_5"
        and not config.attention_bias
        and dtype in (torch.bfloat16, torch.float16)
        and bool(delta and attention)
        and all(layer.head_dim in _HEADS for layer in attention)
        and all(layer.k_dim == layer.v_dim and layer.k_dim in _DELTA_HEADS for layer in delta)
    )


class HybridLayer:
    """The weights of one layer. `first` is all that is computed from its input rows, for `net` or for attention."""

    def __init__(self, index: int, weights: Mapping[str, Tensor], model: HybridModel) -> None:
        shape = model.config.layers[index]
        self.rope: Rope | None = None
        self.net: DeltaNet | None = None
        self.head_norms: HeadNorms | None = None
        if isinstance(shape, DeltaLayer):
            names = (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "a", "b"))
            self.first = model.stacked(weights, *names)
            self.out = model.stacked(weights, "linear_attn.out_proj.weight")
            rule = DeltaWeights(
                conv=model.wide(weights["linear_attn.conv1d.weight"][:, 0].t().contiguous()),
                decay=model.wide(-weights["linear_attn.A_log"].float().exp()),
                bias=model.wide(weights["linear_attn.dt_bias"]),
            )
            norm = model.wide(weights["linear_attn.norm.weight"])
            self.net = DeltaNet(shape, rule, norm, model.config.rms_norm_eps, model.layout.starts[index])
        else:
            arranged = arranged_heads(weights, shape)
            self.first = model.stacked(arranged, *(f"{name}.weight" for name in ("q", "k", "v", "gate")))
            self.out = model.stacked(weights, "self_attn.o_proj.weight")
            self.rope = shape.rope
            self.qkv_width = shape.parts * shape.head_dim
            q_norm, k_norm = (model.keep_norm(arranged[f"{name}_norm"]) for name in ("q", "k"))
            self.head_norms = HeadNorms(q_norm, k_norm, model.config.rms_norm_eps)
        self.gate_up = model.stacked(weights, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = model.stacked(weights, "mlp.down_proj.weight")
        self.input_norm = model.keep_norm(weights["input_layernorm.weight"])
        self.post_norm = model.keep_norm(weights["post_attention_layernorm.weight"])


class HybridModel(CudaDecoder[HybridLayer]):
    """A hybrid decoder. `pools` are those of its attention layers, in their order."""

    @property
    def layout(self) -> StateLayout:
        """Where things lie in an entry of recurrent state."""
        return StateLayout(self.config)

    def products(self) -> list[Tensor]:
        """Those of one layer of each kind."""
        kinds = {layer.net is None: layer for layer in self.layers}
        first = [matrix for layer in kinds.values() for matrix in (layer.first, layer.out)]
        return [*first, self.layers[0].gate_up, self.layers[0].down]

    def keep_norm(self, weight: Tensor) -> Tensor:
        """A norm's factors, which are stored as their distance from 1."""
        return self.wide(1.0 + weight.float())

    def wide(self, tensor: Tensor) -> Tensor:
        """A tensor kept in float32."""
        return self.keep(tensor, torch.float32)

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> HybridLayer:
        """Layer `index` from all its tensors."""
        return HybridLayer(index, weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm."""
        self.norm = self.keep_norm(weights["model.norm.weight"])

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
        assert states is not None
        eps, left, count = self.config.rms_norm_eps, iter(pools), len(token_ids)
        index: Tensor | None = None
        x = self.embedding[token_ids]
        rows = ops.norm(x, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, norm in zip(self.layers, following, strict=True):
            mixed = ops.product(rows, layer.first)
            if layer.net is not None:
                inner = ops.recur_prefill(mixed, layer.net, states)
            else:
                assert layer.rope is not None
                where, pool, qkv = places[layer.rope], next(left), mixed[:, : layer.qkv_width]
                q, gate = ops.turn_and_store(qkv, None, layer.head_norms, where, pool), mixed[:, layer.qkv_width :]
                if layer is self.layers[-1] and count > few:
                    index, where = last_rows(where, few)
                    q, gate, x = q[index], gate[index], x[index]
                inner = ops.sigmoid_gate(gate, ops.attend_prefill(q, where, pool, longest))
            rows = ops.add_norm(x, ops.product(inner, layer.out), layer.post_norm, eps)
            added = ops.gated_product(ops.product(rows, layer.gate_up), layer.down)
            rows = ops.add_norm(x, added, norm, eps)
        return rows if index is None else at_their_rows(rows, index, count)

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
        assert states is not None
        eps, left = self.config.rms_norm_eps, iter(pools)
        (where,) = places.values()
        x = self.embedding[token_ids]
        for layer in self.layers:
            mixed = ops.skinny(ops.norm(x, layer.input_norm, eps), layer.first)
            if layer.net is not None:
                inner = ops.recur_decode(mixed, layer.net, states, where.positions)
            else:
                pool, qkv = next(left), mixed[:, : layer.qkv_width]
                q = ops.turn_and_store(qkv, None, layer.head_norms, where, pool)
                inner = ops.sigmoid_gate(mixed[:, layer.qkv_width :], ops.attend_decode(q, where, pool, longest))
            x = ops.skinny(inner, layer.out, plus=x)
            inner = ops.skinny_gate(ops.norm(x, layer.post_norm, eps), layer.gate_up)
            x = ops.skinny(inner, layer.down, plus=x)
        return self.few_logits(ops.norm(x, self.norm, eps), ops)
