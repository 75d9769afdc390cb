"""What models of mixed layers compute besides the operations of dense ones, and the plain torch form of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.cuda.chunk_plan import saves_start
from worker.cuda.ops import Ops, TorchOps
from worker.delta_rule import DeltaWeights, delta_row
from worker.model_shape import DeltaLayer


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A recurrence and what is done to its output: `norm` float32 [v_dim], then the gate.

    Its rows are [convolution inputs | gate of the output | what makes decay | what makes beta], `width` wide. `start`:
    where its part of an entry of recurrent state begins.
    """

    shape: DeltaLayer
    rule: DeltaWeights
    norm: Tensor
    eps: float
    start: int

    @property
    def outputs(self) -> int:
        return self.shape.v_heads * self.shape.v_dim

    @property
    def gate_at(self) -> int:
        return self.shape.channels

    @property
    def gates_at(self) -> int:
        return self.shape.channels + self.outputs

    @property
    def width(self) -> int:
        return self.gates_at + 2 * self.shape.v_heads

    @property
    def tail_floats(self) -> int:
        """What lies before the state in its part of an entry."""
        return (self.shape.taps - 1) * self.shape.channels


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent states of a pass: all entries [entries, floats], and which of them it uses.

    In prefill `used` is a packed `ChunkPlan` with room for `capacity` chunks; in decode the entry of each row.
    """

    memory: Tensor
    used: Tensor
    capacity: int = 0


class MixedOps(Ops, Protocol):
    """The operations of decoders with layers of several kinds."""

    def sigmoid_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        """`sigmoid(gate) * x`; `gate` may be part of longer rows."""

    def gelu_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        """`gelu(gate) * x` in the tanh form; both may be parts of longer rows."""

    def join(self, x: Tensor, y: Tensor, after: Tensor, eps: float, factor: float = 1.0) -> None:
        """`x = (x + rms_norm(y) * after) * factor` in place."""

    def join_norm(
        self, x: Tensor, y: Tensor, after: Tensor, before: Tensor, eps: float, factor: float = 1.0
    ) -> Tensor:
        """`join`, then `rms_norm(x) * before`."""

    def recur_prefill(self, mixed: Tensor, net: DeltaNet, states: States) -> Tensor:
        """Rows [rows, outputs] of one sequence; states move on as the plan says."""

    def recur_decode(self, mixed: Tensor, net: DeltaNet, states: States, positions: Tensor) -> Tensor:
        """A row a sequence; its entry moves on in place. Rows at position -1 are padding."""


class TorchMixedOps(TorchOps):
    """`MixedOps` in torch alone, the recurrence token by token."""

    def sigmoid_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        return (torch.sigmoid(gate.float()) * x.float()).to(x.dtype)

    def gelu_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        return (F.gelu(gate.float(), approximate="tanh") * x.float()).to(gate.dtype)

    def join(self, x: Tensor, y: Tensor, after: Tensor, eps: float, factor: float = 1.0) -> None:
        x.copy_((x.float() + self.norm(y.float(), after, eps)) * factor)

    def join_norm(
        self, x: Tensor, y: Tensor, after: Tensor, before: Tensor, eps: float, factor: float = 1.0
    ) -> Tensor:
        self.join(x, y, after, eps, factor)
        return self.norm(x, before, eps)

    def recur_prefill(self, mixed: Tensor, net: DeltaNet, states: States) -> Tensor:
        packed = states.used.tolist()
        chunks, source, _, kept = packed[:4]
        saves_at = saves_start(states.capacity)
        saves = [(packed[at], packed[at + 1]) for at in range(saves_at, saves_at + 2 * kept, 2)]
        out = mixed.new_zeros(len(mixed), net.outputs)
        part = states.memory[source, _span(net)].clone()
        for row in range(packed[4 + chunks]):
            out[row] = self._step(mixed[row], net, part)
            for end, target in saves:
                if end == row + 1:
                    states.memory[target, _span(net)] = part
        return out

    def recur_decode(self, mixed: Tensor, net: DeltaNet, states: States, positions: Tensor) -> Tensor:
        out = mixed.new_zeros(len(mixed), net.outputs)
        for row, (entry, position) in enumerate(zip(states.used.tolist(), positions.tolist(), strict=True)):
            if position >= 0:
                out[row] = self._step(mixed[row], net, states.memory[entry, _span(net)])
        return out

    def _step(self, row: Tensor, net: DeltaNet, part: Tensor) -> Tensor:
        """One token, moving on its layer's part of an entry."""
        shape, wide = net.shape, row.float()
        tail = part[: net.tail_floats].view(shape.taps - 1, shape.channels)
        state = part[net.tail_floats :].view(shape.v_heads, shape.k_dim, shape.v_dim)
        inputs, gates = wide[: net.gate_at], wide[net.gates_at : net.width]
        out = self.norm(delta_row(inputs, gates, net.rule, shape, tail, state), net.norm, net.eps)
        gated: Tensor = out.flatten() * F.silu(wide[net.gate_at : net.gates_at])
        return gated.to(row.dtype)


def _span(net: DeltaNet) -> slice:
    shape = net.shape
    return slice(net.start, net.start + net.tail_floats + shape.v_heads * shape.k_dim * shape.v_dim)
