"""What the tiers read from and write to: the paged keys and values and the recurrent states of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.recurrent import StatePool
from worker.tiers.part_file import PartKind, Tensors

_STATE = "state"


class DeviceMemory(Protocol):
    """Between steps only. `blocks` are those of a whole sequence, so that positions are places in them."""

    def empty(self, kind: PartKind, tokens: int) -> Tensors:
        """Room on the host for a part: for the keys and values of so many tokens, or for one state."""

    def read(self, blocks: Sequence[int], start: int, end: int, to: Tensors, at: int) -> None:
        """Copy the keys and values of positions [start, end) to places from `at` on."""

    def write(self, blocks: Sequence[int], start: int, end: int, source: Tensors, at: int) -> None:
        """The other way. The blocks must have one owner."""

    def read_state(self, entry: int, to: Tensors) -> None:
        """Copy a recurrent state."""

    def write_state(self, entry: int, source: Tensors) -> None:
        """The other way."""

    def copy_block(self, source: int, target: int) -> None:
        """Before a block that is shared is written to."""


class PagedMemory:
    """Of a `KVCache` and, where the model recurs, a `StatePool`."""

    def __init__(self, cache: KVCache, states: StatePool | None) -> None:
        self._cache = cache
        self._states = states
        # By token row: [layers, 2, kv_heads, blocks * block_tokens, head_dim]
        self._rows = {f"kv.{index}": memory.flatten(3, 4) for index, memory in enumerate(cache.memories)}

    def empty(self, kind: PartKind, tokens: int) -> Tensors:
        if kind == "state":
            assert self._states is not None
            return {_STATE: self._room((self._states.layout.entry_floats,), torch.float32)}
        return {
            name: self._room((*rows.shape[:3], tokens, rows.shape[4]), rows.dtype)
            for name, rows in self._rows.items()
        }

    def read(self, blocks: Sequence[int], start: int, end: int, to: Tensors, at: int) -> None:
        places = self._places(blocks, start, end)
        for name, rows in self._rows.items():
            to[name][:, :, :, at : at + end - start].copy_(rows.index_select(3, places))

    def write(self, blocks: Sequence[int], start: int, end: int, source: Tensors, at: int) -> None:
        places = self._places(blocks, start, end)
        for name, rows in self._rows.items():
            part = source[name][:, :, :, at : at + end - start]
            rows.index_copy_(3, places, part.to(rows.device))

    def read_state(self, entry: int, to: Tensors) -> None:
        assert self._states is not None
        to[_STATE].copy_(self._states.memory[entry])

    def write_state(self, entry: int, source: Tensors) -> None:
        assert self._states is not None
        self._states.load(entry, source[_STATE])

    def copy_block(self, source: int, target: int) -> None:
        self._cache.copy_block(source, target)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._cache.device.type == "cuda")

    def _places(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        first = start // BLOCK_TOKENS
        held = torch.tensor(blocks[first : -(-end // BLOCK_TOKENS)], dtype=torch.int64, device=self._cache.device)
        rows = held[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=self._cache.device)
        return rows.flatten()[start - first * BLOCK_TOKENS : end - first * BLOCK_TOKENS]
