"""`MixedOps` by the kernels of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.cuda import delta_kernels, mixed_kernels
from worker.cuda.chunk_plan import saves_start, targets_start
from worker.cuda.mixed_ops import DeltaNet, States
from worker.cuda.triton_ops import TritonOps
from worker.delta_rule import NORM_EPS

# Bits depend on all of these.
_CONVOLVED_ROWS = 32
_CONVOLVED_HEADS = 8  # of a row, in one program of a decode step
_STATE_COLUMNS = 32
_TAIL_PIECE = 512
_GATE_PIECE = 2048
# Measured on an H100, of keys in 16 bits: as near to float64 as with thrice the products, in half the time.
_SOLVE_PRECISION = "tf32"


class TritonMixedOps(TritonOps):
    """The kernels of dense decoders and those of the delta rule, windows and gates."""

    def sigmoid_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        return self._gate(gate, x, gelu=False)

    def gelu_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        return self._gate(gate, x, gelu=True)

    def _gate(self, gate: Tensor, x: Tensor, gelu: bool) -> Tensor:
        rows, size = x.shape
        out = x.new_empty(rows, size)
        mixed_kernels.gate_kernel[(rows, -(-size // _GATE_PIECE))](
            gate,
            x,
            out,
            size,
            gate.stride(0),
            x.stride(0),
            gelu,
            _GATE_PIECE,
            self._tiles.early,
            num_warps=4,
            launch_pdl=self._tiles.early,
        )
        return out

    def join(self, x: Tensor, y: Tensor, after: Tensor, eps: float, factor: float = 1.0) -> None:
        self._join(x, y, after, None, eps, factor)

    def join_norm(
        self, x: Tensor, y: Tensor, after: Tensor, before: Tensor, eps: float, factor: float = 1.0
    ) -> Tensor:
        return self._join(x, y, after, before, eps, factor)

    def _join(
        self, x: Tensor, y: Tensor, after: Tensor, before: Tensor | None, eps: float, factor: float
    ) -> Tensor:
        rows, size = x.shape
        out = x if before is None else torch.empty_like(x)
        width = 1 << (size - 1).bit_length()
        mixed_kernels.join_kernel[(rows,)](
            x,
            y,
            after,
            after if before is None else before,
            out,
            size,
            eps,
            factor,
            before is not None,
            width,
            self._tiles.early,
            num_warps=8 if width > 2048 else 4,
            launch_pdl=self._tiles.early,
        )
        return out

    def recur_prefill(self, mixed: Tensor, net: DeltaNet, states: States) -> Tensor:
        shape, rule = net.shape, net.rule
        (rows, stride), memory, plan = mixed.shape, states.memory, states.used
        capacity, entry = states.capacity, memory.stride(0)
        state_at = net.start + net.tail_floats
        heads = (shape.v_heads, shape.k_heads, shape.k_dim, shape.v_dim, shape.channels)
        qkv = mixed.new_empty(rows, shape.channels)
        out = mixed.new_empty(rows, net.outputs)
        change = torch.empty_like(out)
        read = mixed.new_empty(rows, shape.v_heads * shape.k_dim)
        sums = mixed.new_empty(rows, shape.v_heads, dtype=torch.float32)
        before = mixed.new_empty(capacity, shape.v_heads, shape.k_dim, shape.v_dim)
        delta_kernels.convolve_kernel[(-(-rows // _CONVOLVED_ROWS), shape.channels // shape.k_dim)](
            mixed,
            rule.conv,
            memory,
            plan,
            qkv,
            rows,
            stride,
            entry,
            net.start,
            NORM_EPS,
            shape.k_dim**-0.5,
            shape.taps,
            shape.k_heads,
            shape.channels,
            shape.k_dim,
            _CONVOLVED_ROWS,
            num_warps=4,
        )
        delta_kernels.keep_tails_kernel[(-(-shape.channels // _TAIL_PIECE),)](
            mixed,
            memory,
            plan,
            saves_start(capacity),
            stride,
            entry,
            net.start,
            shape.taps,
            shape.channels,
            _TAIL_PIECE,
            num_warps=4,
        )
        delta_kernels.solve_kernel[(capacity, shape.v_heads)](
            mixed,
            qkv,
            rule.decay,
            rule.bias,
            plan,
            change,
            read,
            sums,
            stride,
            net.gates_at,
            *heads,
            _SOLVE_PRECISION,
            num_warps=4,
        )
        columns = min(_STATE_COLUMNS, shape.v_dim)
        delta_kernels.carry_kernel[(shape.v_dim // columns, shape.v_heads)](
            qkv,
            change,
            read,
            sums,
            plan,
            targets_start(capacity),
            before,
            memory,
            entry,
            state_at,
            *heads,
            columns,
            num_warps=4,
            num_stages=2,
        )
        delta_kernels.attend_kernel[(capacity, shape.v_heads)](
            mixed,
            qkv,
            change,
            sums,
            before,
            plan,
            net.norm,
            out,
            stride,
            net.gate_at,
            net.eps,
            *heads,
            num_warps=4,
        )
        return out

    def recur_decode(self, mixed: Tensor, net: DeltaNet, states: States, positions: Tensor) -> Tensor:
        shape, rule = net.shape, net.rule
        (rows, stride), memory, early = mixed.shape, states.memory, self._tiles.early
        entry = memory.stride(0)
        qkv = mixed.new_empty(rows, shape.channels, dtype=torch.float32)
        out = mixed.new_empty(rows, net.outputs)
        pieces = -(-shape.channels // (shape.k_dim * _CONVOLVED_HEADS))
        delta_kernels.convolve_step_kernel[(rows, pieces)](
            mixed,
            rule.conv,
            memory,
            states.used,
            positions,
            qkv,
            stride,
            entry,
            net.start,
            NORM_EPS,
            shape.k_dim**-0.5,
            shape.taps,
            shape.k_heads,
            shape.k_dim,
            shape.channels,
            _CONVOLVED_HEADS,
            early,
            num_warps=4,
            launch_pdl=early,
        )
        delta_kernels.step_kernel[(rows, shape.v_heads)](
            mixed,
            qkv,
            rule.decay,
            rule.bias,
            net.norm,
            memory,
            states.used,
            positions,
            out,
            stride,
            net.gate_at,
            net.gates_at,
            entry,
            net.start + net.tail_floats,
            net.eps,
            shape.v_heads,
            shape.k_heads,
            shape.k_dim,
            shape.v_dim,
            shape.channels,
            early,
            num_warps=8,
            launch_pdl=early,
        )
        return out
