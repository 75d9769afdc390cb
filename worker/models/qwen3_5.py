"""Qwen3.5: layers that carry a fixed-size state along, and in every few of them gated attention.

The model holds no state: keys, values and positions are `attend`'s, recurrent states `recur`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.activations import gated_norm, sigmoid_times
from worker.delta_rule import DeltaWeights
from worker.heads import HeadNorms
from worker.model_shape import AttentionLayer, DeltaLayer, Rope
from worker.models.decoder import Decoder
from worker.models.interface import Attend, Recur
from worker.norm import rms_norm


class GatedAttention:
    """Attention whose output is multiplied by a gate computed from the same rows."""

    def __init__(self, weights: Mapping[str, Tensor], model: Qwen3_5Model, shape: AttentionLayer) -> None:
        arranged = arranged_heads(weights, shape)
        self.qkv = model.joined(arranged, "q", "k", "v")
        self.gate = model.joined(arranged, "gate")
        self.out = model.joined(weights, "self_attn.o_proj")
        q_norm, k_norm = (model.keep_norm(arranged[f"{name}_norm"]) for name in ("q", "k"))
        self.norms = HeadNorms(q_norm, k_norm, model.config.rms_norm_eps)
        self._shape = (-1, shape.parts, shape.head_dim)

    def __call__(self, index: int, rows: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """`residual` plus what this layer makes of normed `rows`."""
        mixed = attend(index, self.qkv(rows).view(self._shape), self.norms)
        return self.out.plus(sigmoid_times(self.gate(rows), mixed), residual)


class GatedDeltaNet:
    """The weights around a recurrence."""

    def __init__(self, weights: Mapping[str, Tensor], model: Qwen3_5Model) -> None:
        self.inputs = model.joined(weights, "linear_attn.in_proj_qkv")
        self.gate = model.joined(weights, "linear_attn.in_proj_z")
        # What decides how long things are remembered stays out of four bits; it is small.
        names = ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight")
        self.state_gates = model.unpacked(torch.cat([weights[name] for name in names]))
        self.out = model.joined(weights, "linear_attn.out_proj")
        self.norm = model.keep(weights["linear_attn.norm.weight"], torch.float32)
        self.recurrence = DeltaWeights(
            conv=model.keep(weights["linear_attn.conv1d.weight"][:, 0].t().contiguous(), torch.float32),
            decay=model.keep(-weights["linear_attn.A_log"].float().exp(), torch.float32),
            bias=model.keep(weights["linear_attn.dt_bias"], torch.float32),
        )
        self._eps = model.config.rms_norm_eps

    def __call__(self, index: int, rows: Tensor, residual: Tensor, recur: Recur | None) -> Tensor:
        """`residual` plus what this layer makes of normed `rows`."""
        assert recur is not None
        mixed = recur(index, self.inputs(rows), self.state_gates(rows), self.recurrence)
        return self.out.plus(gated_norm(mixed, self.gate(rows), self.norm, self._eps), residual)


class Layer:
    """One decoder layer: attention or recurrence, then a gated MLP."""

    def __init__(self, index: int, weights: Mapping[str, Tensor], model: Qwen3_5Model) -> None:
        shape = model.config.layers[index]
        self.attention: GatedAttention | None = None
        self.delta_net: GatedDeltaNet | None = None
        if isinstance(shape, DeltaLayer):
            self.delta_net = GatedDeltaNet(weights, model)
        else:
            self.attention = GatedAttention(weights, model, shape)
        self.gate = model.joined(weights, "mlp.gate_proj")
        self.up = model.joined(weights, "mlp.up_proj")
        self.down = model.joined(weights, "mlp.down_proj")
        self.input_norm = model.keep_norm(weights["input_layernorm.weight"])
        self.post_norm = model.keep_norm(weights["post_attention_layernorm.weight"])


class Qwen3_5Model(Decoder[Layer]):
    """A hybrid decoder."""

    def keep_norm(self, weight: Tensor) -> Tensor:
        """A norm's factors, which are stored as their distance from 1; wide, as bfloat16 near 1 is coarse."""
        return self.keep(1.0 + weight.float(), torch.float32)

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> Layer:
        """Layer `index` from all its tensors."""
        return Layer(index, weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm."""
        self.norm = self.keep_norm(weights["model.norm.weight"])

    def forward(
        self, token_ids: Tensor, attend: Attend, num_layers: int | None = None, recur: Recur | None = None
    ) -> Tensor:
        """Final hidden rows, as `Model.forward` says."""
        eps = self.config.rms_norm_eps
        x = self.embed(token_ids)
        for index, layer in enumerate(self.layers[:num_layers]):
            rows = rms_norm(x, layer.input_norm, eps)
            if layer.attention is not None:
                x = layer.attention(index, rows, x, attend)
            elif layer.delta_net is not None:
                x = layer.delta_net(index, rows, x, recur)
            rows = rms_norm(x, layer.post_norm, eps)
            x = layer.down.plus(layer.up.times(rows, layer.gate.silu(rows)), x)
        return rms_norm(x, self.norm, eps)


def arranged_heads(weights: Mapping[str, Tensor], shape: AttentionLayer) -> dict[str, Tensor]:
    """The projections `q`, `gate`, `k` and `v` and the norms of an attention layer, heads turned as all others are."""
    order, dim = _turned_apart(shape.rope), shape.head_dim
    arranged = {f"{name}_norm": weights[f"self_attn.{name}_norm.weight"][order] for name in ("q", "k")}
    for name in ("weight", "bias") if "self_attn.q_proj.bias" in weights else ("weight",):
        queries = weights[f"self_attn.q_proj.{name}"]
        keys = weights[f"self_attn.k_proj.{name}"]
        inputs = queries.shape[1:]
        split = queries.view(shape.num_heads, 2, dim, *inputs)  # each head's rows: its query, then its gate
        arranged[f"q.{name}"] = split[:, 0, order].flatten(0, 1)
        arranged[f"gate.{name}"] = split[:, 1].flatten(0, 1)
        arranged[f"k.{name}"] = keys.view(-1, dim, *inputs)[:, order].flatten(0, 1)
        arranged[f"v.{name}"] = weights[f"self_attn.v_proj.{name}"]
    return arranged


def _turned_apart(rope: Rope) -> Tensor:
    """Which dimension of a stored head becomes which, so that pairs lie half a head apart.

    Stored heads turn only their first `2 * pairs` dimensions, in pairs (i, i + pairs). Scores are the same for any
    order that queries and keys have in common, and so are their norms.
    """
    dims = torch.arange(rope.head_dim)
    first, second, still = dims[: rope.pairs], dims[rope.pairs : 2 * rope.pairs], dims[2 * rope.pairs :]
    middle = len(still) // 2
    return torch.cat((first, still[:middle], second, still[middle:]))
