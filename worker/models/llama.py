"""Llama, Mistral, Qwen2 and Qwen3: dense decoders with grouped-query attention and a gated MLP.

The model holds no state: where keys and values go, and what a row attends to, is the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from worker.heads import HeadNorms
from worker.int4 import Int4Linear, can_pack
from worker.linear import Linear
from worker.model_config import ModelConfig
from worker.norm import rms_norm
from worker.rope import RotaryTable

# attend(layer, qkv [rows, heads + 2 * kv_heads, head_dim], norms of its heads) -> [rows, heads * head_dim]
Attend = Callable[[int, Tensor, HeadNorms | None], Tensor]


class Layer:
    """The weights of one decoder layer; q, k and v are joined into one product."""

    def __init__(self, weights: dict[str, Tensor], config: ModelConfig, make: Callable[..., Linear]) -> None:
        def joined(*names: str) -> Linear:
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            weight = torch.cat([weights[f"{name}.weight"] for name in names])
            return make(weight, torch.cat(biases) if biases else None)

        self.qkv = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = joined("self_attn.o_proj")
        self.gate = joined("mlp.gate_proj")
        self.up = joined("mlp.up_proj")
        self.down = joined("mlp.down_proj")
        self.input_norm = weights["input_layernorm.weight"]
        self.post_norm = weights["post_attention_layernorm.weight"]
        self.head_norms: HeadNorms | None = None
        if config.qk_norm:
            q_norm, k_norm = weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"]
            self.head_norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)


class LlamaModel:
    """A dense decoder. `dtype` is that of the products; on a CPU rows travel between them in float32.

    `packed` holds matrices in 4 bits beside `dtype`, where their shapes allow it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        packed: bool = False,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._packed = packed
        self.device = device
        self.hidden_dtype = torch.float32 if device.type == "cpu" else dtype
        self.max_positions = max_positions
        self.weight_bytes = 0
        self.layers: list[Layer] = []
        self.rotary = RotaryTable(config, max_positions, device)
        self._load(weights)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Build each layer as soon as all its tensors have come, so that only a few are held twice."""
        prefix = "model.layers."
        pending: dict[int, dict[str, Tensor]] = {}
        built: dict[int, Layer] = {}
        top: dict[str, Tensor] = {}
        per_layer = _tensors_per_layer(self.config)
        for name, tensor in weights:
            if not name.startswith(prefix):
                top[name] = tensor
                continue
            index_text, _, rest = name[len(prefix) :].partition(".")
            index = int(index_text)
            if rest.endswith("norm.weight"):
                tensor = self._keep(tensor)
            pending.setdefault(index, {})[rest] = tensor
            if len(pending[index]) == per_layer:
                built[index] = Layer(pending.pop(index), self.config, self._linear)
        self.layers = [built[index] for index in range(self.config.num_layers)]
        self.norm = self._keep(top["model.norm.weight"])
        embedding = top["model.embed_tokens.weight"]
        self.embedding = embedding.to(device=self.device, dtype=self.dtype)
        self.weight_bytes += self.embedding.numel() * self.embedding.element_size()
        head = embedding if self.config.tie_word_embeddings else top["lm_head.weight"]
        # Never packed: measured, four bits in the head cost more perplexity than in all layers together.
        self.head = Linear(head, None, self.dtype, self.device)
        self.weight_bytes += self.head.weight_bytes

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = tensor.to(device=self.device, dtype=self.hidden_dtype)
        self.weight_bytes += kept.numel() * kept.element_size()
        return kept

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self._packed and can_pack(weight):
            linear: Linear = Int4Linear(weight, bias, self.dtype, self.device)
        else:
            linear = Linear(weight, bias, self.dtype, self.device)
        self.weight_bytes += linear.weight_bytes
        return linear

    def forward(self, token_ids: Tensor, attend: Attend, num_layers: int | None = None) -> Tensor:
        """Final hidden rows [rows, hidden] of int64 `token_ids` [rows].

        `num_layers` runs only the first ones: the start-up check needs one of each shape.
        """
        config = self.config
        eps = config.rms_norm_eps
        shape = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        x = self.embedding[token_ids].to(self.hidden_dtype)
        for index, layer in enumerate(self.layers[:num_layers]):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(shape)
            x = layer.out.plus(attend(index, qkv, layer.head_norms), x)
            rows = rms_norm(x, layer.post_norm, eps)
            x = layer.down.plus(layer.up.times(rows, layer.gate.silu(rows)), x)
        return rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of final hidden rows."""
        return self.head(hidden).float()


def _tensors_per_layer(config: ModelConfig) -> int:
    """How many tensors one layer of this configuration has."""
    count = 9  # q, k, v, o, gate, up, down and two norms
    count += 3 * config.attention_bias + config.attention_out_bias + 3 * config.mlp_bias + 2 * config.qk_norm
    return count
