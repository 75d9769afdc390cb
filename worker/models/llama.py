"""Llama, Mistral, Qwen2 and Qwen3: dense decoders with grouped-query attention and a gated MLP.

The model holds no state: where keys and values go, and what a row attends to, is the caller's `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.linear import Linear
from worker.model_config import ModelConfig
from worker.rope import RotaryTable, rotate

# attend(layer, q [rows, heads, head_dim], k [rows, kv_heads, head_dim], v likewise) -> [rows, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer:
    """The weights of one decoder layer; q, k, v and gate, up are joined into one product each."""

    def __init__(self, weights: dict[str, Tensor], config: ModelConfig, make: Callable[..., Linear]) -> None:
        def joined(*names: str) -> Linear:
            biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            weight = torch.cat([weights[f"{name}.weight"] for name in names])
            return make(weight, torch.cat(biases) if biases else None)

        self.qkv = joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = joined("self_attn.o_proj")
        self.gate_up = joined("mlp.gate_proj", "mlp.up_proj")
        self.down = joined("mlp.down_proj")
        self.input_norm = weights["input_layernorm.weight"]
        self.post_norm = weights["post_attention_layernorm.weight"]
        self.q_norm = weights.get("self_attn.q_norm.weight")
        self.k_norm = weights.get("self_attn.k_norm.weight")


class LlamaModel:
    """A dense decoder. `dtype` is that of the products; on a CPU rows travel between them in float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.hidden_dtype = torch.float32 if device.type == "cpu" else dtype
        self.max_positions = max_positions
        self.weight_bytes = 0
        self.layers: list[Layer] = []
        self._rotary = RotaryTable(config, max_positions, device)
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim
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
        self.head = self._linear(head, None)

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = tensor.to(device=self.device, dtype=self.hidden_dtype)
        self.weight_bytes += kept.numel() * kept.element_size()
        return kept

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        linear = Linear(weight, bias, self.dtype, self.device)
        self.weight_bytes += linear.weight_bytes
        return linear

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, num_layers: int | None = None
    ) -> Tensor:
        """Final hidden rows [rows, hidden] of int64 `token_ids` [rows] at int64 `positions` [rows].

        `num_layers` runs only the first ones: the start-up check needs one of each shape.
        """
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        cos, sin = self._rotary.rows(positions)
        x = self.embedding[token_ids].to(self.hidden_dtype)
        for index, layer in enumerate(self.layers[:num_layers]):
            qkv = layer.qkv(_rms_norm(x, layer.input_norm, eps))
            q, k, v = torch.split(qkv, (self._q_width, self._kv_width, self._kv_width), dim=-1)
            q = q.reshape(-1, heads, dim)
            k = k.reshape(-1, kv_heads, dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = _rms_norm(q, layer.q_norm, eps)
                k = _rms_norm(k, layer.k_norm, eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            x = x + layer.out(attend(index, q, k, v.reshape(-1, kv_heads, dim)))
            gate, up = layer.gate_up(_rms_norm(x, layer.post_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return _rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of final hidden rows."""
        return self.head(hidden).float()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _tensors_per_layer(config: ModelConfig) -> int:
    """How many tensors one layer of this configuration has."""
    count = 9  # q, k, v, o, gate, up, down and two norms
    count += 3 * config.attention_bias + config.attention_out_bias + 3 * config.mlp_bias + 2 * config.qk_norm
    return count
