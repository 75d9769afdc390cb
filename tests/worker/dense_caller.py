"""What a model asks of its caller, done for one sequence by the plain formulas: apart from the pool's code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.heads import HeadNorms
from worker.model_config import load_config
from worker.model_shape import AttentionLayer, DeltaLayer
from worker.models import model_class
from worker.norm import rms_norm
from worker.recurrent import Recurrence, StatePool
from worker.rope import rotate
from worker.weights import iter_weights

CPU = torch.device("cpu")


def load(path: Any, dtype: torch.dtype = torch.float32, packed: bool = False) -> Any:
    """The model of a directory, of the class its architecture has."""
    config = load_config(path)
    weights = iter_weights(path, config)
    return model_class(config)(config, weights, dtype, CPU, config.max_position_embeddings, packed)


class DenseCaller:
    """One sequence: its keys and values by layer, its recurrent state, and how many tokens it has."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        recurs = any(isinstance(layer, DeltaLayer) for layer in model.config.layers)
        self.pool = StatePool(model.config, 1, CPU) if recurs else None

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits of the next tokens `ids`, in one pass."""
        recur = Recurrence.prefill(self.pool, 0, len(ids)) if self.pool else None
        hidden = self.model.forward(ids, self._attend, recur=recur)
        self.length += len(ids)
        return self.model.logits(hidden)

    def _attend(self, layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        spec = self.model.config.layers[layer]
        assert isinstance(spec, AttentionLayer)
        assert norms is not None
        assert qkv.shape[1:] == (spec.parts, spec.head_dim)
        positions = self.length + torch.arange(len(qkv))
        cos, sin = (table.unsqueeze(1) for table in self.model.rotaries[spec.rope].rows(positions))
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        q = rotate(rms_norm(qkv[:, :heads], norms.q, norms.eps), cos, sin)
        source = layer if spec.shares_kv_with is None else spec.shares_kv_with
        if source == layer:
            k = rotate(rms_norm(qkv[:, heads : heads + kv_heads], norms.k, norms.eps), cos, sin)
            self._keys[layer] = torch.cat([self._keys.get(layer, k[:0]), k])
            self._values[layer] = torch.cat([self._values.get(layer, k[:0]), qkv[:, heads + kv_heads :]])
        group = heads // kv_heads
        keys = self._keys[source].repeat_interleave(group, dim=1)
        values = self._values[source].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / spec.head_dim**0.5
        back = positions[:, None] - torch.arange(len(keys))
        hidden = back < 0
        if spec.window is not None:
            hidden |= back >= spec.window
        shares = F.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def some_ids(seed: int, count: int) -> Tensor:
    """Random token ids of the tiny models' vocabulary."""
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor) -> Tensor:
    """What `transformers` computes.

    Hidden states are asked for because, without them, Gemma 4 in transformers 5.24 fails on a config that shares
    keys and has no embeddings by layer.
    """
    logits: Tensor = model(ids[None], output_hidden_states=True).logits[0]
    return logits


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
