"""The tensors of the paged KV pool. Which block belongs to whom is `block_pool.py`'s business.

Layers with heads of one number and size lie in one tensor [layers, 2, kv_heads, blocks, block_tokens, head_dim]:
within a layer the blocks of one head lie side by side, so a run of consecutive block ids is read in place and any
other list is gathered in one call. A block is a place in every layer. Layers that read another's keys and values, and
those that do not attend, have no memory here. Block 0 stays zero: it pads block lists up to the key length that
attention wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.block_pool import ZERO_BLOCK
from worker.cpu_kernels import PoolRows
from worker.model_shape import AttentionLayer, LayerShape, ModelConfig
from worker.vector_ops import COLUMNS

BLOCK_TOKENS = 32
_SWAPPED_BLOCKS = 16  # at a time, on their way to the host or back


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    keeping = _keeping(config.layers).values()
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in keeping) * BLOCK_TOKENS * dtype.itemsize


def _keeping(layers: Sequence[LayerShape]) -> dict[int, AttentionLayer]:
    """The layers that have keys and values of their own, by index."""
    return {
        index: layer
        for index, layer in enumerate(layers)
        if isinstance(layer, AttentionLayer) and layer.shares_kv_with is None
    }


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
        """`layers`: hold only that many of the first ones."""
        self.layers = config.layers[:layers]
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        alike: dict[tuple[int, int], list[int]] = {}
        for index, layer in _keeping(self.layers).items():
            alike.setdefault((layer.num_kv_heads, layer.head_dim), []).append(index)
        self.copier = plain_copy
        """Copies a block of one memory: what uses a device sets what is faster there."""
        self.memories: list[Tensor] = []
        # Of each layer, by token row [2, kv_heads, blocks * block_tokens, head_dim].
        self._rows: dict[int, Tensor] = {}
        for (kv_heads, head_dim), members in alike.items():
            memory = _zeros((len(members), 2, kv_heads, num_blocks, BLOCK_TOKENS, head_dim), dtype, device)
            self.memories.append(memory)
            self._rows.update(zip(members, memory.flatten(3, 4).unbind(0), strict=True))
        for index, shape in enumerate(self.layers):
            if isinstance(shape, AttentionLayer) and shape.shares_kv_with is not None:
                self._rows[index] = self._rows[shape.shares_kv_with]
        self.has_arrays = (
            device.type == "cpu"
            and dtype in (torch.float32, torch.bfloat16)
            and all(head_dim % COLUMNS == 0 for _, head_dim in alike)
        )
        """Whether `arrays` can be had: on a CPU, where our kernels take the head size."""

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [tokens, kv_heads, head_dim] at token rows (block * block_tokens + offset) [tokens]."""
        keys, values = self._rows[layer].unbind(0)
        keys.index_copy_(1, rows, k.transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, rows, v.transpose(0, 1).to(values.dtype))

    def read(self, layer: int, blocks: BlockRun | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each [kv_heads, tokens, head_dim], of a block list. A run is a view: do not write."""
        keys, values = self._rows[layer].unbind(0)
        if isinstance(blocks, BlockRun):
            span = slice(blocks.first * BLOCK_TOKENS, (blocks.first + blocks.count) * BLOCK_TOKENS)
            return keys[:, span], values[:, span]
        shape = (len(keys), -1, BLOCK_TOKENS, keys.shape[2])
        keys, values = keys.view(shape), values.view(shape)
        return keys.index_select(1, blocks).flatten(1, 2), values.index_select(1, blocks).flatten(1, 2)

    def pool(self, layer: int) -> Tensor:
        """Keys and values that a layer reads, [2, kv_heads, blocks, block_tokens, head_dim], in place."""
        rows = self._rows[layer]
        return rows.view(2, rows.shape[1], self.num_blocks, BLOCK_TOKENS, rows.shape[3])

    def arrays(self, layer: int) -> tuple[PoolRows, PoolRows]:
        """Keys and values of a layer, each [kv_heads, blocks * block_tokens, head_dim]; bfloat16 as uint16."""
        rows = self._rows[layer]
        rows = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
        return rows[0].numpy(), rows[1].numpy()

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over all layers: what copy-on-write does before a shared block is written."""
        for memory in self.memories:
            self.copier(memory, source, target)

    def touch_first(self) -> None:
        """Have the pages that the first blocks lie in, on a CPU. They are large ones, two for each head of each layer:
        a first prompt waited for them most of a second.
        """
        if self.device.type == "cpu":
            for memory in self.memories:
                memory[:, :, :, ZERO_BLOCK, 0, 0].zero_()

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero blocks: what is no number in them would spoil those who read beside it, as a masked 0 times NaN does."""
        for index, memory in self._pieces(blocks):
            memory.index_fill_(3, index, 0)

    def save(self, blocks: Sequence[int]) -> list[Tensor]:
        """A host copy of blocks, for a sequence that is swapped out; in pieces, so that little room is needed for it.

        From a card it comes to pinned memory, once what is under way has run: only `load` may read it before that.
        """
        saved = []
        for index, memory in self._pieces(blocks):
            part = memory.index_select(3, index)
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=self.device.type == "cuda")
            saved.append(host.copy_(part, non_blocking=True))
        return saved

    def load(self, blocks: Sequence[int], saved: Sequence[Tensor]) -> None:
        """Put what `save` returned back into (other) blocks."""
        for (index, memory), part in zip(self._pieces(blocks), saved, strict=True):
            memory.index_copy_(3, index, part.to(self.device, non_blocking=True))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """A few of the blocks at a time, as an index, and each memory to use it on."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for some in torch.split(index, _SWAPPED_BLOCKS):
            for memory in self.memories:
                yield some, memory


def plain_copy(memory: Tensor, source: int, target: int) -> None:
    """Copy a block of one memory. In torch it is many small copies where the memory is large."""
    memory[:, :, :, target].copy_(memory[:, :, :, source])


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
