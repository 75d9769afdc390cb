"""Inner loops of the products of a decode step: TILE outputs of a matrix for a few rows, written for vector registers.

A matrix lies in tiles, the TILE outputs of one input side by side: every instruction does the same to each of them,
and a row takes the same steps whatever the number of rows is. Addresses are plain integers (`array.ctypes.data`); the
caller answers for their range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from worker.cpu_kernels import Floats
from worker.vectors import FLOATS, INTS, VECTOR_BYTES, WIDTH, Vectors, all_lanes, f32, i8, i16, i32, i64

TILE = WIDTH
"""Outputs that a product makes at a time."""
GROUP = 32
"""Inputs of a packed matrix that share a scale and a zero point."""
RUN = 8
"""Inputs that one round of a dense product takes."""

_CHUNK_BYTES = TILE * 2  # four inputs of each output
_GROUP_BYTES = TILE * GROUP // 2
_SCALE_BYTES = TILE * 4
# Where the levels of four inputs lie in the 16 bits of an output, as `int4.Tiles` has them.
_SHIFTS = (0, 8, 4, 12)


def _packed(rows: int) -> Any:
    """The intrinsic for a matrix in 4 bits and bfloat16 rows: out[row, output] = sum of x * weight.

    Of the matrix, `levels` and `scales` hold GROUP inputs at a time as `int4.Tiles` has them. x: bfloat16 [rows,
    inputs], `x_bytes` apart; sums: float32 [rows, groups] of each group's x, `sum_bytes` apart; out [rows, TILE].
    """

    @intrinsic
    def packed(
        _: Any, levels: Any, scales: Any, groups: Any, x: Any, x_bytes: Any, sums: Any, sum_bytes: Any, out: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            levels, scales, groups, x, x_bytes, sums, sum_bytes, out = args
            ops, b = Vectors(builder), builder
            x_rows = [b.add(x, b.mul(i64(row), x_bytes)) for row in range(rows)]
            sum_rows = [b.add(sums, b.mul(i64(row), sum_bytes)) for row in range(rows)]

            def group(g: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                at = b.add(levels, b.mul(g, i64(_GROUP_BYTES)))
                inputs = b.mul(g, i64(GROUP * 2))
                parts = [[all_lanes(0.0)] * 2 for _ in range(rows)]
                for chunk in range(GROUP // 4):
                    pairs = ops.levels(ops.at(at, chunk * _CHUNK_BYTES))
                    for row in range(rows):
                        for half in range(2):
                            factor = ops.load(ops.at(b.add(x_rows[row], inputs), (chunk * 2 + half) * 4), i32)
                            parts[row][half] = ops.dot(parts[row][half], pairs[half], ops.spread(factor))
                step = b.add(scales, b.mul(g, i64(_SCALE_BYTES)))
                scale, zero = ops.halves(step), ops.halves(ops.at(step, _SCALE_BYTES // 2))
                done = []
                for row in range(rows):
                    total = ops.call("fma", b.fadd(*parts[row]), scale, totals[row])
                    of_group = ops.load(b.add(sum_rows[row], b.mul(g, i64(4))), f32)
                    done.append(ops.call("fma", ops.spread(of_group), zero, total))
                return done

            for row, total in enumerate(ops.loop(groups, [all_lanes(0.0)] * rows, group)):
                ops.store(total, ops.at(out, row * VECTOR_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return packed


class _Sums:
    """Float32 sums of `rows` rows in the making, of the inputs of even and of odd number apart.

    One sum would wait for itself. All products of float32 rows are added up here, so that equal weights give equal
    bits however they are stored.
    """

    def __init__(self, ops: Vectors, x: ir.Value, x_bytes: ir.Value, rows: int) -> None:
        self._ops = ops
        self._x_rows = [ops.b.add(x, ops.b.mul(i64(row), x_bytes)) for row in range(rows)]
        self.start = [all_lanes(0.0)] * (2 * rows)

    def inputs_from(self, first: ir.Value) -> list[ir.Value]:
        """The address of input `first` of each row."""
        offset = self._ops.b.mul(first, i64(4))
        return [self._ops.b.add(row, offset) for row in self._x_rows]

    def add(self, sums: list[ir.Value], weight: ir.Value, starts: list[ir.Value], step: int) -> None:
        """Add input `step` after `starts` times its weights [TILE] to each row's."""
        for row, start in enumerate(starts):
            factor = self._ops.spread(self._ops.load(self._ops.at(start, step * 4), f32))
            place = row * 2 + step % 2
            sums[place] = self._ops.call("fma", weight, factor, sums[place])

    def finish(self, sums: list[ir.Value], out: ir.Value) -> None:
        """Write the results to out [rows, TILE]."""
        for row in range(len(self._x_rows)):
            total = self._ops.b.fadd(sums[row * 2], sums[row * 2 + 1])
            self._ops.store(total, self._ops.at(out, row * VECTOR_BYTES))


_Weights = Callable[[int], ir.Value]  # of one input after another, each for TILE outputs


def _product(
    inputs: int, read: Callable[[Vectors, ir.Value, ir.Value, ir.Value], _Weights]
) -> Callable[[int], Any]:
    """Makes, for so many rows, the intrinsic out[row, output] = sum of x * weight for float32 rows.

    A round of its loop takes `inputs` inputs, whose weights `read(ops, weights, scales, round)` gives. x: [rows,
    rounds * inputs], `x_bytes` apart; out [rows, TILE].
    """

    def of_rows(rows: int) -> Any:
        @intrinsic
        def product(_: Any, weights: Any, scales: Any, rounds: Any, x: Any, x_bytes: Any, out: Any) -> Any:
            def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
                weights, scales, rounds, x, x_bytes, out = args
                ops = Vectors(b)
                sums = _Sums(ops, x, x_bytes, rows)

                def one_round(i: ir.Value, had: list[ir.Value]) -> list[ir.Value]:
                    weight, starts, now = (
                        read(ops, weights, scales, i),
                        sums.inputs_from(b.mul(i, i64(inputs))),
                        [*had],
                    )
                    for step in range(inputs):
                        sums.add(now, weight(step), starts, step)
                    return now

                sums.finish(ops.loop(rounds, sums.start, one_round), out)
                return context.get_dummy_value()

            return types.void(*[types.intp] * 6), generate

        return product

    return of_rows


def _dense(ops: Vectors, weights: ir.Value, _scales: ir.Value, i: ir.Value) -> _Weights:
    """Of a float32 matrix: weights [runs, RUN, TILE], there are no scales."""
    run = ops.b.add(weights, ops.b.mul(i, i64(RUN * VECTOR_BYTES)))
    return lambda step: ops.load(ops.at(run, step * VECTOR_BYTES))


def _exact_4(ops: Vectors, levels: ir.Value, scales: ir.Value, i: ir.Value) -> _Weights:
    """Of a matrix in 4 bits, as `int4.Tiles` has it: the bits of its float32 values.

    A level times its scale is exact in float32, so a weight has the one rounding that its float32 value has.
    """
    b = ops.b
    group, step = b.add(levels, b.mul(i, i64(_GROUP_BYTES))), b.add(scales, b.mul(i, i64(_SCALE_BYTES)))
    scale, zero = ops.halves(step), ops.halves(ops.at(step, _SCALE_BYTES // 2))

    def weight(place: int) -> ir.Value:
        four = ops.load(ops.at(group, place // 4 * _CHUNK_BYTES), ir.VectorType(i16, WIDTH))
        level = ops.number(b.lshr(b.zext(four, INTS), ir.Constant(INTS, [_SHIFTS[place % 4]] * WIDTH)))
        return ops.call("fma", level, scale, zero)

    return weight


def _exact_8(ops: Vectors, levels: ir.Value, scales: ir.Value, i: ir.Value) -> _Weights:
    """Of a matrix in 8 bits, as `row_head.ByteTiles` has it; a level times its scale is the weight."""
    b = ops.b
    group, scale = b.add(levels, b.mul(i, i64(GROUP * TILE))), ops.halves(b.add(scales, b.mul(i, i64(TILE * 2))))

    def weight(place: int) -> ir.Value:
        level = ops.load(ops.at(group, place * TILE), ir.VectorType(i8, WIDTH))
        return b.fmul(b.sitofp(b.sext(level, INTS), FLOATS), scale)

    return weight


def _by_rows(kernel: Callable[[int], Any]) -> Any:
    """The product of the rows of `x` from `first` on, as many at a time as registers hold; returns how many."""
    one, two, four, eight = (kernel(rows) for rows in (1, 2, 4, 8))

    @njit(nogil=True)
    def product(weights: int, scales: int, rounds: int, x: Floats, first: int, out: int) -> int:
        start, x_bytes, left = x[first].ctypes.data, x.strides[0], len(x) - first
        if left >= 8:
            eight(weights, scales, rounds, start, x_bytes, out)
            return 8
        if left >= 4:
            four(weights, scales, rounds, start, x_bytes, out)
            return 4
        if left >= 2:
            two(weights, scales, rounds, start, x_bytes, out)
            return 2
        one(weights, scales, rounds, start, x_bytes, out)
        return 1

    return product


packed_1, packed_2, packed_4 = (_packed(rows) for rows in (1, 2, 4))
dense, exact_4, exact_8 = (
    _by_rows(_product(inputs, read)) for inputs, read in ((RUN, _dense), (GROUP, _exact_4), (GROUP, _exact_8))
)
