"""The tensors of the paged KV pool. Which block belongs to whom is `block_pool.py`'s business.

One tensor [layers, 2, kv_heads, blocks, block_tokens, head_dim]: within a layer the blocks of one head lie side by
side, so a run of consecutive block ids is read in place and any other list is gathered in one call. Block 0 stays
zero: it pads block lists up to the key length that attention wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.cpu_kernels import Floats
from worker.model_config import ModelConfig

BLOCK_TOKENS = 32


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return config.num_layers * 2 * config.num_kv_heads * BLOCK_TOKENS * config.head_dim * dtype.itemsize


class KVCache:
    """Physical KV memory of `num_blocks` blocks. Zeroed at the start, as a masked 0 times NaN would be NaN."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: int | None = None,
    ) -> None:
        shape = (layers or config.num_layers, 2, config.num_kv_heads, num_blocks, BLOCK_TOKENS, config.head_dim)
        self.memory = _zeros(shape, dtype, device)
        self.num_blocks = num_blocks
        # Per layer: keys and values by token row [2, kv_heads, blocks * block_tokens, head_dim].
        self._rows = list(self.memory.flatten(3, 4).unbind(0))
        self.kv_heads = config.num_kv_heads
        on_cpu = device.type == "cpu" and dtype == torch.float32
        self._arrays = [(rows[0].numpy(), rows[1].numpy()) for rows in self._rows] if on_cpu else []

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_dim] at token rows (block * block_tokens + offset) [tokens]."""
        keys, values = self._rows[layer].unbind(0)
        keys.index_copy_(1, rows, k.transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, rows, v.transpose(0, 1).to(values.dtype))

    def read(self, layer: int, blocks: BlockRun | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [kv_heads, tokens, head_dim], of a block list. A run is a view: do not write."""
        if isinstance(blocks, BlockRun):
            keys, values = self._rows[layer].unbind(0)
            span = slice(blocks.first * BLOCK_TOKENS, (blocks.first + blocks.count) * BLOCK_TOKENS)
            return keys[:, span], values[:, span]
        pair = self.memory[layer]
        return pair[0].index_select(1, blocks).flatten(1, 2), pair[1].index_select(1, blocks).flatten(1, 2)

    @property
    def has_arrays(self) -> bool:
        """Whether `arrays` can be had: float32 on a CPU."""
        return bool(self._arrays)

    def arrays(self, layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer, each [kv_heads, blocks * block_tokens, head_dim], as NumPy sees them."""
        return self._arrays[layer]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over all layers: what copy-on-write does before a shared block is written."""
        self.memory[:, :, :, target].copy_(self.memory[:, :, :, source])

    def save(self, blocks: Sequence[int]) -> Tensor:
        """A host copy of blocks, for a sequence that is swapped out."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.memory.device)
        return self.memory.index_select(3, index).cpu()

    def load(self, blocks: Sequence[int], saved: Tensor) -> None:
        """Put what `save` returned back into (other) blocks."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.memory.device)
        self.memory.index_copy_(3, index, saved.to(self.memory.device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory; on a CPU pages that the system gives on first use, so that start-up touches none of them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((math.prod(shape), dtype.itemsize), np.uint8)).view(dtype).view(shape)


class BlockRun:
    """Consecutive block ids, readable in place."""

    __slots__ = ("count", "first")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
