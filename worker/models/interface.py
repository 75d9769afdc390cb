"""What a model asks of its caller, and what the caller may ask of any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from worker.delta_rule import DeltaWeights
from worker.heads import HeadNorms
from worker.model_shape import ModelConfig, Rope
from worker.rope import Rotary

# attend(layer, qkv [rows, parts, head_dim], norms of its heads) -> [rows, heads * head_dim]. What `config.layers`
# says of the layer is the caller's to obey: parts, window, whose keys and values it reads, which rotary table.
Attend = Callable[[int, Tensor, HeadNorms | None], Tensor]

# recur(layer, inputs of the convolution [rows, channels], gates [rows, 2 * v_heads], weights)
# -> [rows, v_heads * v_dim]. `gates` holds what makes decay, then what makes beta.
Recur = Callable[[int, Tensor, Tensor, DeltaWeights], Tensor]


class Model(Protocol):
    """A loaded model. It holds no state of any sequence."""

    config: ModelConfig
    dtype: torch.dtype
    """Type of the products."""
    hidden_dtype: torch.dtype
    """Type of rows between them, float32 on a CPU."""
    device: torch.device
    max_positions: int
    weight_bytes: int
    rotaries: Mapping[Rope, Rotary]
    """The factors for each `rope` of the attention layers."""

    def forward(
        self, token_ids: Tensor, attend: Attend, num_layers: int | None = None, recur: Recur | None = None
    ) -> Tensor:
        """Final hidden rows [rows, hidden] of int64 `token_ids` [rows].

        `num_layers` runs only the first ones: the start-up check needs one of each shape. A config with delta
        layers needs `recur`.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [rows, hidden] that the first layer starts from."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of final hidden rows."""
