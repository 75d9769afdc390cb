"""The weights of a dense decoder as the CUDA backend reads them: plain matrices, gate and up side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.cuda.decoder import CudaDecoder
from worker.cuda.ops import Ops, Places, at_their_rows, last_rows
from worker.heads import HeadNorms
from worker.model_error import ModelError
from worker.model_shape import AttentionLayer, ModelConfig
from worker.rope import Rotary

FAMILIES = ("llama", "qwen2", "qwen3")


def is_served(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether this backend computes such a model: the others run layer by layer in torch."""
    power = config.head_dim & (config.head_dim - 1) == 0
    plain = not (config.attention_out_bias or config.mlp_bias or config.layer_shapes)
    return (
        config.architecture in FAMILIES
        and plain
        and power
        and 16 <= config.head_dim <= 256
        and dtype in (torch.bfloat16, torch.float16)
    )


class DenseLayer:
    """The weights of one layer. `qkv` holds q, k and v one below the other, `gate_up` gate and up."""

    def __init__(self, weights: Mapping[str, Tensor], model: DenseModel) -> None:
        self.qkv = model.stacked(weights, *(f"self_attn.{name}_proj.weight" for name in "qkv"))
        names = [f"self_attn.{name}_proj.bias" for name in "qkv"]
        self.bias = model.stacked(weights, *names) if names[0] in weights else None
        self.out = model.stacked(weights, "self_attn.o_proj.weight")
        self.gate_up = model.stacked(weights, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = model.stacked(weights, "mlp.down_proj.weight")
        self.input_norm = model.stacked(weights, "input_layernorm.weight")
        self.post_norm = model.stacked(weights, "post_attention_layernorm.weight")
        self.head_norms: HeadNorms | None = None
        if model.config.qk_norm:
            q_norm = model.stacked(weights, "self_attn.q_norm.weight")
            k_norm = model.stacked(weights, "self_attn.k_norm.weight")
            self.head_norms = HeadNorms(q_norm, k_norm, model.config.rms_norm_eps)


class DenseModel(CudaDecoder[DenseLayer]):
    """Llama, Mistral, Qwen2 or Qwen3. The passes take the operations, and the pool of each layer, from the caller."""

    @property
    def rotary(self) -> Rotary:
        """The factors of every layer."""
        (rotary,) = self.rotaries.values()
        return rotary

    @property
    def attention(self) -> AttentionLayer:
        """The shape of every layer."""
        layer = self.config.layers[0]
        assert isinstance(layer, AttentionLayer)
        return layer

    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> DenseLayer:
        """Layer `index` from all its tensors. Raises `ModelError` for a config of another family."""
        if not is_served(self.config, torch.bfloat16):
            raise ModelError(f"model_type: {self.config.architecture} of this shape is not one of this backend's")
        return DenseLayer(weights, self)

    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take the final norm."""
        self.norm = self.keep(weights["model.norm.weight"], self.dtype)

    def products(self) -> list[Tensor]:
        """Those of a layer: all are alike."""
        layer = self.layers[0]
        return [layer.qkv, layer.out, layer.gate_up, layer.down]

    def prefill(
        self, token_ids: Tensor, ops: Ops, places: Places, pools: list[Tensor], longest: int, few: int
    ) -> Tensor:
        """Rows of one sequence's tokens, none past `longest`, of which the last token's is its final hidden row.

        Ids past `places` are padding. A pass of more than `few` rows computes the last layer's output for the last
        `few` tokens alone.
        """
        eps, count = self.config.rms_norm_eps, len(token_ids)
        index: Tensor | None = None
        x = self.embedding[token_ids]
        rows = ops.norm(x, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for layer, pool, norm in zip(self.layers, pools, following, strict=True):
            qkv = ops.product(rows, layer.qkv)
            q = ops.turn_and_store(qkv, layer.bias, layer.head_norms, places, pool)
            if layer is self.layers[-1] and count > few:
                index, places = last_rows(places, few)
                q, x = q[index], x[index]
            mixed = ops.attend_prefill(q, places, pool, longest)
            rows = ops.add_norm(x, ops.product(mixed, layer.out), layer.post_norm, eps)
            added = ops.gated_product(ops.product(rows, layer.gate_up), layer.down)
            rows = ops.add_norm(x, added, norm, eps)
        return rows if index is None else at_their_rows(rows, index, count)

    def decode(self, token_ids: Tensor, ops: Ops, places: Places, pools: list[Tensor], longest: int) -> Tensor:
        """Float32 logits of one token a sequence."""
        eps = self.config.rms_norm_eps
        x = self.embedding[token_ids]
        for layer, pool in zip(self.layers, pools, strict=True):
            qkv = ops.skinny(ops.norm(x, layer.input_norm, eps), layer.qkv)
            q = ops.turn_and_store(qkv, layer.bias, layer.head_norms, places, pool)
            x = ops.skinny(ops.attend_decode(q, places, pool, longest), layer.out, plus=x)
            inner = ops.skinny_gate(ops.norm(x, layer.post_norm, eps), layer.gate_up)
            x = ops.skinny(inner, layer.down, plus=x)
        return self.few_logits(ops.norm(x, self.norm, eps), ops)
