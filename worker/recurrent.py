"""Recurrent state: what one sequence carries through the delta layers, whatever its length.

A pool holds entries of one fixed size. A running sequence owns one, which passes move on in place; a snapshot owns
another, which nobody writes to. An entry is the state at exactly one position of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.delta_kernels import delta_rows
from worker.delta_rule import DeltaWeights, delta_row
from worker.model_shape import DeltaLayer, ModelConfig


class StateLayout:
    """Where things lie in an entry of float32: for each delta layer its convolution's last inputs, then its state."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises `ValueError` for a model that has no recurrent state."""
        layers = {index: layer for index, layer in enumerate(config.layers) if isinstance(layer, DeltaLayer)}
        if not layers:
            raise ValueError(f"{config.architecture} has no recurrent layers")
        (self.shape,) = set(layers.values())  # of all delta layers, which are alike
        shape = self.shape
        self.tail_floats = (shape.taps - 1) * shape.channels
        self.layer_floats = self.tail_floats + shape.v_heads * shape.k_dim * shape.v_dim
        self.starts = {layer: place * self.layer_floats for place, layer in enumerate(layers)}
        self.entry_floats = len(layers) * self.layer_floats
        self.entry_bytes = self.entry_floats * 4

    def span(self, layer: int) -> slice:
        """The part of an entry that belongs to `layer`."""
        return slice(self.starts[layer], self.starts[layer] + self.layer_floats)


class StatePool:
    """The entries, `memory` [entries, floats]. Which is whose is the caller's business."""

    def __init__(self, config: ModelConfig, num_entries: int, device: torch.device) -> None:
        self.layout = StateLayout(config)
        size = (num_entries, self.layout.entry_floats)
        if device.type == "cpu":
            # Pages that the system gives on first use, so that start-up touches none of them.
            self.memory = torch.from_numpy(np.zeros(size, np.float32))
        else:
            self.memory = torch.zeros(size, dtype=torch.float32, device=device)

    def clear(self, entry: int) -> None:
        """Make an entry the state before the first token."""
        self.memory[entry].zero_()

    def copy(self, source: int, target: int) -> None:
        """Make `target` the state that `source` is."""
        self.memory[target].copy_(self.memory[source])

    def save(self, entry: int) -> Tensor:
        """A host copy of an entry."""
        return self.memory[entry].cpu().clone()

    def load(self, entry: int, saved: Tensor) -> None:
        """Put what `save` returned into an entry."""
        self.memory[entry].copy_(saved)


class Capture(NamedTuple):
    """After the first `rows` rows of a pass, copy the state to entry `target`."""

    rows: int
    target: int


class Recurrence:
    """The `recur` of one pass: row i continues from entry `entries[i]` of the pool; rows past them are padding.

    A prefill names the entry of its sequence once a row, a decode step names as many entries as it has sequences.
    Entries move on in place, layer by layer: all layers must run, or none of the entries is a state any more.
    `captures`, rising by rows, may only be asked of a prefill.
    """

    def __init__(self, pool: StatePool, entries: Sequence[int], captures: Sequence[Capture] = ()) -> None:
        self._pool = pool
        self._entries = list(entries)
        self._captures = list(captures)
        if captures and len(set(entries)) != 1:
            raise ValueError("states are captured along one sequence")
        if any(not 0 < rows <= len(entries) for rows, _ in captures):
            raise ValueError(f"captures {self._captures} lie outside {len(entries)} rows")

    @classmethod
    def prefill(cls, pool: StatePool, entry: int, rows: int, captures: Sequence[Capture] = ()) -> Recurrence:
        """That of `rows` tokens of one sequence."""
        return cls(pool, [entry] * rows, captures)

    def __call__(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Output rows [rows, v_heads * v_dim], zero for padding."""
        pool, shape = self._pool, self._pool.layout.shape
        out = inputs.new_zeros(inputs.shape[0], shape.v_heads, shape.v_dim)
        span = pool.layout.span(layer)
        start = 0
        for capture in self._captures:
            self._run(layer, inputs, gates, weights, start, capture.rows, out)
            pool.memory[capture.target, span] = pool.memory[self._entries[0], span]
            start = capture.rows
        self._run(layer, inputs, gates, weights, start, len(self._entries), out)
        return out.flatten(1)

    def _run(
        self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights, start: int, end: int, out: Tensor
    ) -> None:
        """Rows [start, end)."""
        pool, layout = self._pool, self._pool.layout
        shape = layout.shape
        entries = self._entries[start:end]
        if pool.memory.device.type == "cpu" and inputs.dtype == pool.memory.dtype == torch.float32:
            delta_rows(
                inputs[start:end].contiguous().numpy(),
                gates[start:end].contiguous().numpy(),
                weights.conv.numpy(),
                weights.decay.numpy(),
                weights.bias.numpy(),
                pool.memory.numpy(),
                np.array(entries, np.int64),
                layout.starts[layer],
                shape.k_heads,
                shape.k_dim,
                out[start:end].numpy(),
            )
            return
        span = layout.span(layer)
        wide = pool.memory.dtype
        for row, entry in enumerate(entries, start):
            part = pool.memory[entry, span]
            tail = part[: layout.tail_floats].view(shape.taps - 1, shape.channels)
            state = part[layout.tail_floats :].view(shape.v_heads, shape.k_dim, shape.v_dim)
            out[row] = delta_row(inputs[row].to(wide), gates[row].to(wide), weights, shape, tail, state)
