"""Inner loops of the CPU's attention, written for vector registers.

Numba leaves it to the compiler whether a loop's sums live in registers, and measured, they did not: 40 GFLOP/s a
core where these reach 100. So each operation here is generated as LLVM code on whole vectors. A tile is LANES query
rows side by side, the two vectors of one register pair: every instruction does the same to each lane, and a lane's
result cannot depend on which rows lie in the others, nor on its place among them.

Addresses are plain integers (`array.ctypes.data`); the caller answers for their range.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_cpu = llvmlite.binding.get_host_cpu_features()

LANES = 32
MASKED = -1e30
"""The score of a key that a row must not see. Finite, as the difference of two infinities is none."""

HAS_PAIRS = bool(_cpu.get("avx512bf16", False))
"""Whether this processor multiplies pairs of bfloat16, which `score_pairs` and `mix_pairs` need."""
HAS_WIDE = bool(_cpu.get("avx512f", False))
"""Whether it has enough wide registers for what `score_float_row` and `dense_1` to `dense_8` hold in them."""

_WIDTH = 16  # numbers of 32 bits in a vector
_VECTORS = LANES // _WIDTH
# Results of a product that are in the making at a time: as many sums as registers hold (32 of 512 bits, or 16 of 256).
COLUMNS = 8 if HAS_WIDE else 2
_ROW_BYTES = LANES * 4
_VECTOR_BYTES = _WIDTH * 4
# 2 ** r for |r| <= 1/2, highest power first: the Taylor series of e ** (r ln 2), off by 2e-8 of the value at most.
_EXP2 = (1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2,
         2.402265069591007e-1, 6.931471805599453e-1, 1.0)  # fmt: skip
_EXP2_LEAST = -126.0

TILE = _WIDTH
"""Outputs that a packed product makes at a time."""
GROUP = 32
"""Inputs of a packed matrix that share a scale and a zero point."""
SCORED_KEYS = _WIDTH
"""Keys that `score_row` takes at a time."""
PAIR_DIMENSIONS = 2 * _WIDTH
"""What the sizes of `score_row` and `mix_1` to `mix_4` are multiples of."""
_RUN = 8  # inputs of a dense product that one round of its loop takes
_CHUNK_BYTES = TILE * 2  # four inputs of each output
_GROUP_BYTES = TILE * GROUP // 2
_SCALE_BYTES = TILE * 4
# Levels 0 to 15 as bfloat16, twice: what lies in the bit above a level's four does not matter.
_LEVELS = [int(bits) for bits in np.arange(16, dtype=np.float32).view(np.uint32) >> 16] * 2

_f32, _i16, _i32, _i64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_floats, _ints = ir.VectorType(_f32, _WIDTH), ir.VectorType(_i32, _WIDTH)

# The bfloat16 product is an instruction that LLVM knows by changing names: it is written as text.
llvmlite.binding.initialize_native_asmparser()


class _Vectors:
    """Vector instructions at the place where `builder` stands."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, address: ir.Value, offset: int) -> ir.Value:
        return self.b.add(address, _i64(offset))

    def load(self, address: ir.Value, kind: ir.Type = _floats) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=2, typ=kind)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def spread(self, number: ir.Value) -> ir.Value:
        """`number` in every lane."""
        kind = ir.VectorType(number.type, _WIDTH)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), number, _i32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(_ints, [0] * _WIDTH))

    def call(self, name: str, *values: ir.Value) -> ir.Value:
        kind = values[0].type
        function = ir.FunctionType(kind, [value.type for value in values])
        to = cgutils.get_or_insert_function(self.b.module, function, f"llvm.{name}.v16f32")  # type: ignore[no-untyped-call]
        return self.b.call(to, values)

    def most(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2 ** x for x <= 0, in the same steps for every lane."""
        x = self.most(x, all_lanes(_EXP2_LEAST))
        whole = self.call("rint", x)
        rest = self.b.fsub(x, whole)
        value = reduce(
            lambda sum_, factor: self.call("fma", sum_, rest, all_lanes(factor)), _EXP2[1:], all_lanes(_EXP2[0])
        )
        exponent = self.b.shl(self.b.fptosi(whole, _ints), ir.Constant(_ints, [23] * _WIDTH))
        return self.b.bitcast(self.b.add(self.b.bitcast(value, _ints), exponent), _floats)

    def pair(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """Two vectors of float32 as one of bfloat16 pairs, rounded to nearest even."""
        b, half = self.b, ir.Constant(_ints, [16] * _WIDTH)

        def rounded(value: ir.Value) -> ir.Value:
            bits = b.bitcast(value, _ints)
            odd = b.and_(b.lshr(bits, half), ir.Constant(_ints, [1] * _WIDTH))
            return b.add(b.add(bits, ir.Constant(_ints, [0x7FFF] * _WIDTH)), odd)

        upper = b.and_(rounded(high), ir.Constant(_ints, [-0x10000] * _WIDTH))
        return b.or_(b.lshr(rounded(low), half), upper)

    def dot(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total + x[0] * y[0] + x[1] * y[1] for the pairs of bfloat16 in each lane."""
        kind = ir.FunctionType(_floats, [_floats, _ints, _ints])
        return self.b.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, x, y])

    def levels(self, address: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Levels as pairs of bfloat16, from the lower and from the upper halves of 32 bytes."""
        words = ir.VectorType(_i16, 2 * _WIDTH)
        levels = self.b.zext(self.load(address, ir.VectorType(ir.IntType(8), 2 * _WIDTH)), words)
        upper = self.b.lshr(levels, ir.Constant(words, [4] * 2 * _WIDTH))
        name = "llvm.x86.avx512.permvar.hi.512"
        kind = ir.FunctionType(words, [words, words])
        look_up = cgutils.get_or_insert_function(self.b.module, kind, name)  # type: ignore[no-untyped-call]
        table = ir.Constant(words, _LEVELS)
        return tuple(self.b.bitcast(self.b.call(look_up, [table, at]), _ints) for at in (levels, upper))

    def halves(self, address: ir.Value) -> ir.Value:
        """A vector of float32 from float16 in memory."""
        return self.b.fpext(self.load(address, ir.VectorType(ir.HalfType(), _WIDTH)), _floats)

    def added_up(self, rows: list[ir.Value]) -> ir.Value:
        """The sum of the lanes of each of 16 vectors, in the lane of its number."""
        width = _WIDTH // 2
        while width:
            # Halve the vectors: each new one holds the half sums of two, in runs of `width` lanes.
            lanes = range(_WIDTH)
            first = [lane // width * 2 * width + lane % width for lane in lanes]
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [
                self.b.fadd(
                    self.b.shuffle_vector(x, y, ir.Constant(_ints, first)),
                    self.b.shuffle_vector(x, y, ir.Constant(_ints, [lane + width for lane in first])),
                )
                for x, y in pairs
            ]
            width //= 2
        return rows[0]

    def loop(self, count: ir.Value, start: list[ir.Value], body: Callable[[ir.Value, list[ir.Value]], Any]) -> Any:
        """Run `body(i, carried)` for i < count, at least once; returns what the last round carried on."""
        before = self.b.block
        block, after = self.b.append_basic_block("loop"), self.b.append_basic_block("after")
        self.b.branch(block)
        self.b.position_at_end(block)
        i = self.b.phi(_i64)
        i.add_incoming(_i64(0), before)
        carried = []
        for value in start:
            phi = self.b.phi(value.type)
            phi.add_incoming(value, before)
            carried.append(phi)
        results = body(i, carried)
        following = self.b.add(i, _i64(1))
        i.add_incoming(following, block)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, block)
        self.b.cbranch(self.b.icmp_signed("<", following, count), block, after)
        self.b.position_at_end(after)
        return results


def all_lanes(number: float) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(_floats, [number] * _WIDTH)


def _product(pairs: bool, onto: bool) -> Any:
    """The intrinsic for columns j < COLUMNS: out[j, lane] = sum over i < steps of a[i, lane] * b(i, j).

    b(i, j) lies at `b + i * step_bytes + j * column_bytes`. `pairs`: a and b hold pairs of bfloat16, else float32.
    `onto`: the sums start from out[j, lane] * factors[lane], else from zero. Each sum takes its terms in rising i.
    """

    @intrinsic
    def product(
        _: Any, a: Any, b: Any, out: Any, steps: Any, step_bytes: Any, column_bytes: Any, factors: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            a, b, out, steps, step_bytes, column_bytes, factors = args
            ops = _Vectors(builder)
            places = [(j, v) for j in range(COLUMNS) for v in range(_VECTORS)]
            outs = [ops.at(out, j * _ROW_BYTES + v * _VECTOR_BYTES) for j, v in places]
            start = [all_lanes(0.0)] * len(places)
            if onto:
                scale = [ops.load(ops.at(factors, v * _VECTOR_BYTES)) for v in range(_VECTORS)]
                start = [builder.fmul(ops.load(to), scale[v]) for to, (_, v) in zip(outs, places, strict=True)]

            def step(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                row = builder.add(a, builder.mul(i, _i64(_ROW_BYTES)))
                kind = _ints if pairs else _floats
                rows = [ops.load(ops.at(row, v * _VECTOR_BYTES), kind) for v in range(_VECTORS)]
                column = builder.add(b, builder.mul(i, step_bytes))
                done: list[ir.Value] = []
                for j in range(COLUMNS):
                    factor = ops.spread(ops.load(column, _i32 if pairs else _f32))
                    for v in range(_VECTORS):
                        total = sums[j * _VECTORS + v]
                        done.append(
                            ops.dot(total, rows[v], factor) if pairs else ops.call("fma", rows[v], factor, total)
                        )
                    column = builder.add(column, column_bytes)
                return done

            for total, to in zip(ops.loop(steps, start, step), outs, strict=True):
                ops.store(total, to)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return product


def _weigh(_: Any, scores: Any, keys: Any, most: Any, total: Any, factors: Any, pairs: Any) -> Any:
    """One step of the online softmax (Milakov and Gimelshein, 2018) over `keys` (even) more scores [keys, LANES].

    Turns scores, which are logarithms to base 2, into weights relative to the greatest score so far, `most` [LANES];
    adds them to `total` [LANES], and leaves in `factors` [LANES] what earlier sums must be multiplied by. The
    weights of MASKED scores are zero. `pairs`, where it is not 0, takes them as pairs of bfloat16 [keys / 2, LANES].
    """

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        scores, keys, most, total, factors, pairs = args
        ops = _Vectors(builder)
        for v in range(_VECTORS):
            here = [ops.at(address, v * _VECTOR_BYTES) for address in (scores, most, total, factors, pairs)]
            _weigh_vector(ops, keys, *here)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


def _weigh_vector(
    ops: _Vectors,
    keys: ir.Value,
    scores: ir.Value,
    most: ir.Value,
    total: ir.Value,
    factors: ir.Value,
    pairs: ir.Value,
) -> None:
    b = ops.b

    def row(address: ir.Value, i: ir.Value) -> ir.Value:
        return b.add(address, b.mul(i, _i64(_ROW_BYTES)))

    before = ops.load(most)
    (greatest,) = ops.loop(keys, [before], lambda i, had: [ops.most(ops.load(row(scores, i)), had[0])])
    factor = ops.exp2(b.fsub(before, greatest))

    def weight(address: ir.Value) -> ir.Value:
        score = ops.load(address)
        seen = b.fcmp_ordered(">", score, all_lanes(MASKED / 2))
        value = b.select(seen, ops.exp2(b.fsub(score, greatest)), all_lanes(0.0))
        ops.store(value, address)
        return value

    def two(i: ir.Value, had: list[ir.Value]) -> list[ir.Value]:
        first = row(scores, b.mul(i, _i64(2)))
        low, high = weight(first), weight(ops.at(first, _ROW_BYTES))
        ops.store(ops.pair(low, high), row(pairs, i))
        return [b.fadd(b.fadd(had[0], low), high)]

    (sums,) = ops.loop(b.sdiv(keys, _i64(2)), [b.fmul(ops.load(total), factor)], two)
    ops.store(greatest, most)
    ops.store(factor, factors)
    ops.store(sums, total)


def _score_rows(pairs: bool) -> Any:
    """The intrinsic for dot products of one query [dim] with 16 keys [16, dim], to out [16]; dim: a multiple of 32.

    `pairs`: query and keys hold bfloat16, else float32. out is float32.
    """

    @intrinsic
    def score(_: Any, query: Any, keys: Any, dim: Any, out: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            query, keys, dim, out = args
            ops, kind = _Vectors(b), _ints if pairs else _floats
            row_bytes = b.mul(dim, _i64(2 if pairs else 4))

            def part(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                offset = b.mul(i, _i64(_VECTOR_BYTES))
                of_query, at, done = ops.load(b.add(query, offset), kind), b.add(keys, offset), []
                for total in sums:
                    of_key = ops.load(at, kind)
                    done.append(
                        ops.dot(total, of_key, of_query) if pairs else ops.call("fma", of_key, of_query, total)
                    )
                    at = b.add(at, row_bytes)
                return done

            sums = ops.loop(b.sdiv(row_bytes, _i64(_VECTOR_BYTES)), [all_lanes(0.0)] * _WIDTH, part)
            ops.store(ops.added_up(sums), out)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return score


def _mix_rows(members: int) -> Any:
    """The intrinsic out[member, d] += sum over keys of weights[member, key] * values[key, d], for 32 dimensions.

    weights: bfloat16, `weight_bytes` from member to member; values: bfloat16, `value_bytes` from key to key; keys:
    how many, even; out: float32 [members, 32]. A member takes the same steps whatever `members` is.
    """

    @intrinsic
    def mix(_: Any, weights: Any, weight_bytes: Any, values: Any, value_bytes: Any, keys: Any, out: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            weights, weight_bytes, values, value_bytes, keys, out = args
            ops = _Vectors(b)
            outs = [ops.at(out, place * _VECTOR_BYTES) for place in range(members * 2)]
            words = ir.VectorType(_i16, 2 * _WIDTH)

            def two(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                first = b.add(values, b.mul(i, b.mul(value_bytes, _i64(2))))
                low, high = ops.load(first, words), ops.load(b.add(first, value_bytes), words)
                halves = []
                for start in (0, _WIDTH):
                    order = [place for d in range(start, start + _WIDTH) for place in (d, d + 2 * _WIDTH)]
                    mask = ir.Constant(ir.VectorType(_i32, 2 * _WIDTH), order)
                    halves.append(b.bitcast(b.shuffle_vector(low, high, mask), _ints))
                done = []
                for member in range(members):
                    at = b.add(b.add(weights, b.mul(weight_bytes, _i64(member))), b.mul(i, _i64(4)))
                    weight = ops.spread(ops.load(at, _i32))
                    done += [ops.dot(sums[member * 2 + half], halves[half], weight) for half in range(2)]
                return done

            sums = ops.loop(b.sdiv(keys, _i64(2)), [ops.load(at) for at in outs], two)
            for total, at in zip(sums, outs, strict=True):
                ops.store(total, at)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return mix


def _packed(rows: int) -> Any:
    """The intrinsic for TILE outputs of a matrix in 4 bits and `rows` rows: out[row, output] = sum of x * weight.

    Of the matrix, `levels` and `scales` hold GROUP inputs at a time as `int4.tiled` lays them out. x: bfloat16
    [rows, inputs], `x_bytes` apart; sums: float32 [rows, groups] of each group's x, `sum_bytes` apart; out [rows,
    TILE]. A row takes the same steps whatever `rows` is.
    """

    @intrinsic
    def packed(
        _: Any, levels: Any, scales: Any, groups: Any, x: Any, x_bytes: Any, sums: Any, sum_bytes: Any, out: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            levels, scales, groups, x, x_bytes, sums, sum_bytes, out = args
            ops, b = _Vectors(builder), builder
            x_rows = [b.add(x, b.mul(_i64(row), x_bytes)) for row in range(rows)]
            sum_rows = [b.add(sums, b.mul(_i64(row), sum_bytes)) for row in range(rows)]

            def group(g: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                at = b.add(levels, b.mul(g, _i64(_GROUP_BYTES)))
                inputs = b.mul(g, _i64(GROUP * 2))
                parts = [[all_lanes(0.0)] * 2 for _ in range(rows)]
                for chunk in range(GROUP // 4):
                    pairs = ops.levels(ops.at(at, chunk * _CHUNK_BYTES))
                    for row in range(rows):
                        for half in range(2):
                            factor = ops.load(ops.at(b.add(x_rows[row], inputs), (chunk * 2 + half) * 4), _i32)
                            parts[row][half] = ops.dot(parts[row][half], pairs[half], ops.spread(factor))
                step = b.add(scales, b.mul(g, _i64(_SCALE_BYTES)))
                scale, zero = ops.halves(step), ops.halves(ops.at(step, _SCALE_BYTES // 2))
                done = []
                for row in range(rows):
                    total = ops.call("fma", b.fadd(*parts[row]), scale, totals[row])
                    of_group = ops.load(b.add(sum_rows[row], b.mul(g, _i64(4))), _f32)
                    done.append(ops.call("fma", ops.spread(of_group), zero, total))
                return done

            for row, total in enumerate(ops.loop(groups, [all_lanes(0.0)] * rows, group)):
                ops.store(total, ops.at(out, row * _VECTOR_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return packed


def _dense(rows: int) -> Any:
    """The intrinsic for TILE outputs of a float32 matrix and `rows` rows: out[row, output] = sum of x * weight.

    weights: [inputs, TILE], inputs a multiple of _RUN; x: float32 [rows, inputs], `x_bytes` apart; out [rows, TILE].
    Inputs of even and of odd number are summed apart, as one sum would wait for itself; a row takes the same steps
    whatever `rows` is.
    """

    @intrinsic
    def dense(_: Any, weights: Any, inputs: Any, x: Any, x_bytes: Any, out: Any) -> Any:
        def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            weights, inputs, x, x_bytes, out = args
            ops = _Vectors(b)
            x_rows = [b.add(x, b.mul(_i64(row), x_bytes)) for row in range(rows)]

            def run(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                at, of_x = b.mul(i, _i64(_RUN * _VECTOR_BYTES)), b.mul(i, _i64(_RUN * 4))
                starts = [b.add(row, of_x) for row in x_rows]
                for step in range(_RUN):
                    weight = ops.load(ops.at(b.add(weights, at), step * _VECTOR_BYTES))
                    for row, start in enumerate(starts):
                        place = row * 2 + step % 2
                        factor = ops.spread(ops.load(ops.at(start, step * 4), _f32))
                        sums = [*sums[:place], ops.call("fma", weight, factor, sums[place]), *sums[place + 1 :]]
                return sums

            sums = ops.loop(b.sdiv(inputs, _i64(_RUN)), [all_lanes(0.0)] * (2 * rows), run)
            for row in range(rows):
                ops.store(b.fadd(sums[row * 2], sums[row * 2 + 1]), ops.at(out, row * _VECTOR_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), generate

    return dense


weigh: Any = intrinsic(_weigh)
score_row, score_float_row = _score_rows(pairs=True), _score_rows(pairs=False)
mix_1, mix_2, mix_3, mix_4 = (_mix_rows(members) for members in (1, 2, 3, 4))
score_floats, score_pairs = _product(pairs=False, onto=False), _product(pairs=True, onto=False)
mix_floats, mix_pairs = _product(pairs=False, onto=True), _product(pairs=True, onto=True)
packed_1, packed_2, packed_4 = (_packed(rows) for rows in (1, 2, 4))
dense_1, dense_2, dense_4, dense_8 = (_dense(rows) for rows in (1, 2, 4, 8))
