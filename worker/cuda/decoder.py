"""What the models of this backend have in common: weights as plain matrices, joined on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from worker.cuda.ops import Ops
from worker.linear import Linear
from worker.models.decoder import Decoder

LayerT = TypeVar("LayerT")


class CudaDecoder(Decoder[LayerT], Generic[LayerT]):
    """A stack of layers whose passes take the operations and the memory from the caller."""

    def products(self) -> list[Tensor]:
        """Matrices of every shape that prefill multiplies many rows with."""
        raise NotImplementedError

    def unpacked(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product whose matrix can be had as it is."""
        linear = Linear(weight, bias, self.dtype, self.device, repack=False)
        self.weight_bytes += linear.weight_bytes
        return linear

    def stacked(self, weights: Mapping[str, Tensor], *names: str) -> Tensor:
        """These tensors one below the other, on the device: joined there, so that the host holds no copy."""
        parts = [weights[name].to(device=self.device, dtype=self.dtype) for name in names]
        return self.keep(parts[0] if len(parts) == 1 else torch.cat(parts), self.dtype)

    def few_logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """Float32 logits [rows, vocab] of a few final hidden rows."""
        # On a CPU, where tests run this, the head may hold its matrix as an array.
        weight = self.head.weight if isinstance(self.head, Linear) else torch.from_numpy(self.head.weight)
        return ops.skinny(hidden, weight, dtype=torch.float32)
