"""What all families have in common: loading layer by layer, and the products around the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from worker.freed_memory import give_back_freed
from worker.int4 import Int4Linear, can_pack
from worker.linear import Linear
from worker.model_shape import AttentionLayer, ModelConfig, Rope
from worker.rope import Rotary
from worker.row_head import RowHead
from worker.tiled_linear import TiledLinear
from worker.weight_names import LAYER_PREFIX, weight_names

LayerT = TypeVar("LayerT")


class Decoder(ABC, Generic[LayerT]):
    """A stack of layers. `dtype` is that of the products; on a CPU rows travel between them in float32.

    `packed` holds matrices in 4 bits beside `dtype`, where their shapes allow it.
    """

    embedding: Tensor
    head: Linear | RowHead

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
        self.packed = packed
        self.device = device
        self.hidden_dtype = torch.float32 if device.type == "cpu" else dtype
        self.max_positions = max_positions
        self.weight_bytes = 0
        ropes = dict.fromkeys(layer.rope for layer in config.layers if isinstance(layer, AttentionLayer))
        self.rotaries: Mapping[Rope, Rotary] = {rope: Rotary(rope, max_positions, device) for rope in ropes}
        self.layers: list[LayerT] = []
        self._load(weights)

    @abstractmethod
    def build_layer(self, index: int, weights: Mapping[str, Tensor]) -> LayerT:
        """Layer `index` from all its tensors, by their names within the layer."""

    @property
    def in_tiles(self) -> bool:
        """Whether matrices are laid out for a step that runs whole layers as well: only where there is such a step."""
        return False

    @abstractmethod
    def load_top(self, weights: Mapping[str, Tensor]) -> None:
        """Take what this family has outside its layers, besides embedding and head."""

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Build each layer as soon as all its tensors have come, so that only these are held twice."""
        in_layers = (
            name[len(LAYER_PREFIX) :] for name in weight_names(self.config) if name.startswith(LAYER_PREFIX)
        )
        missing = Counter(int(name.partition(".")[0]) for name in in_layers)
        pending: dict[int, dict[str, Tensor]] = {}
        built: dict[int, LayerT] = {}
        top: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                self.embedding = self.keep(tensor, self.dtype)
                if self.config.tie_word_embeddings:
                    self.head = self._head(tensor, self.embedding)
            elif name == "lm_head.weight":
                self.head = self._head(tensor, None)
            elif not name.startswith(LAYER_PREFIX):
                top[name] = tensor
            else:
                index_text, _, rest = name[len(LAYER_PREFIX) :].partition(".")
                index = int(index_text)
                pending.setdefault(index, {})[rest] = tensor
                missing[index] -= 1
                if not missing[index]:
                    built[index] = self.build_layer(index, pending.pop(index))
                    give_back_freed()
        self.layers = [built[index] for index in range(self.config.num_layers)]
        self.load_top(top)
        top.clear()
        give_back_freed()

    def _head(self, weight: Tensor, embedding: Tensor | None) -> Linear | RowHead:
        """The product that makes logits; `embedding` is what is kept of the same matrix already.

        It is never packed: measured, four bits in the head cost more perplexity than in all layers together.
        """
        kept = weight.to(device=self.device, dtype=self.dtype) if embedding is None else embedding
        if not RowHead.takes(kept):
            return self.unpacked(weight)
        head = RowHead(weight, kept)
        shared = embedding is not None or head.own_bytes
        self.weight_bytes += head.own_bytes + (0 if shared else kept.numel() * kept.element_size())
        return head

    def keep(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor that is used as it is, where the model runs."""
        kept = tensor.to(device=self.device, dtype=dtype)
        self.weight_bytes += kept.numel() * kept.element_size()
        return kept

    def unpacked(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product that stays in `dtype` whatever the other ones are packed to."""
        linear = Linear(weight, bias, self.dtype, self.device)
        self.weight_bytes += linear.weight_bytes
        return linear

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product in the layout that was asked for."""
        linear: Linear
        if self.packed and can_pack(weight):
            linear = Int4Linear(weight, bias, self.dtype, self.device, in_tiles=self.in_tiles)
        elif self.in_tiles:
            linear = TiledLinear(weight, bias, self.device)
        else:
            return self.unpacked(weight, bias)
        self.weight_bytes += linear.weight_bytes
        return linear

    def joined(self, weights: Mapping[str, Tensor], *names: str) -> Linear:
        """One product of several projections side by side, with their biases where they have any."""
        biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        return self.linear(weight, torch.cat(biases) if biases else None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [rows, hidden] that the first layer starts from."""
        return self.embedding[token_ids].to(self.hidden_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of final hidden rows."""
        return self.head(hidden).float()
