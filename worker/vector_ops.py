"""Inner loops of the CPU's attention, written for vector registers.

A tile is LANES query rows side by side, the two vectors of one register pair: every instruction does the same to each
lane, and a lane's result cannot depend on which rows lie in the others, nor on its place among them.

Addresses are plain integers (`array.ctypes.data`); the caller answers for their range.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker.vectors import FLOATS, HAS_WIDE, INTS, VECTOR_BYTES, WIDTH, Vectors, all_lanes, f32, i16, i32, i64

LANES = 32
MASKED = -1e30
"""The score of a key that a row must not see. Finite, as the difference of two infinities is none."""

_VECTORS = LANES // WIDTH
# Results of a product that are in the making at a time: as many sums as registers hold (32 of 512 bits, or 16 of 256).
COLUMNS = 8 if HAS_WIDE else 2
_ROW_BYTES = LANES * 4

SCORED_KEYS = WIDTH
"""Keys that `score_row` takes at a time."""
PAIR_DIMENSIONS = 2 * WIDTH
"""What the sizes of `score_row` and `mix_1` to `mix_4` are multiples of."""


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
            ops = Vectors(builder)
            places = [(j, v) for j in range(COLUMNS) for v in range(_VECTORS)]
            outs = [ops.at(out, j * _ROW_BYTES + v * VECTOR_BYTES) for j, v in places]
            start = [all_lanes(0.0)] * len(places)
            if onto:
                scale = [ops.load(ops.at(factors, v * VECTOR_BYTES)) for v in range(_VECTORS)]
                start = [builder.fmul(ops.load(to), scale[v]) for to, (_, v) in zip(outs, places, strict=True)]

            def step(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                row = builder.add(a, builder.mul(i, i64(_ROW_BYTES)))
                kind = INTS if pairs else FLOATS
                rows = [ops.load(ops.at(row, v * VECTOR_BYTES), kind) for v in range(_VECTORS)]
                column = builder.add(b, builder.mul(i, step_bytes))
                done: list[ir.Value] = []
                for j in range(COLUMNS):
                    factor = ops.spread(ops.load(column, i32 if pairs else f32))
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
        ops = Vectors(builder)
        for v in range(_VECTORS):
            here = [ops.at(address, v * VECTOR_BYTES) for address in (scores, most, total, factors, pairs)]
            _weigh_vector(ops, keys, *here)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


def _weigh_vector(
    ops: Vectors,
    keys: ir.Value,
    scores: ir.Value,
    most: ir.Value,
    total: ir.Value,
    factors: ir.Value,
    pairs: ir.Value,
) -> None:
    b = ops.b

    def row(address: ir.Value, i: ir.Value) -> ir.Value:
        return b.add(address, b.mul(i, i64(_ROW_BYTES)))

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
        first = row(scores, b.mul(i, i64(2)))
        low, high = weight(first), weight(ops.at(first, _ROW_BYTES))
        ops.store(ops.pair(low, high), row(pairs, i))
        return [b.fadd(b.fadd(had[0], low), high)]

    (sums,) = ops.loop(b.sdiv(keys, i64(2)), [b.fmul(ops.load(total), factor)], two)
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
            ops, kind = Vectors(b), INTS if pairs else FLOATS
            row_bytes = b.mul(dim, i64(2 if pairs else 4))

            def part(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                offset = b.mul(i, i64(VECTOR_BYTES))
                of_query, at, done = ops.load(b.add(query, offset), kind), b.add(keys, offset), []
                for total in sums:
                    of_key = ops.load(at, kind)
                    done.append(
                        ops.dot(total, of_key, of_query) if pairs else ops.call("fma", of_key, of_query, total)
                    )
                    at = b.add(at, row_bytes)
                return done

            sums = ops.loop(b.sdiv(row_bytes, i64(VECTOR_BYTES)), [all_lanes(0.0)] * WIDTH, part)
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
            ops = Vectors(b)
            outs = [ops.at(out, place * VECTOR_BYTES) for place in range(members * 2)]
            words = ir.VectorType(i16, 2 * WIDTH)

            def two(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                first = b.add(values, b.mul(i, b.mul(value_bytes, i64(2))))
                low, high = ops.load(first, words), ops.load(b.add(first, value_bytes), words)
                halves = []
                for start in (0, WIDTH):
                    order = [place for d in range(start, start + WIDTH) for place in (d, d + 2 * WIDTH)]
                    mask = ir.Constant(ir.VectorType(i32, 2 * WIDTH), order)
                    halves.append(b.bitcast(b.shuffle_vector(low, high, mask), INTS))
                done = []
                for member in range(members):
                    at = b.add(b.add(weights, b.mul(weight_bytes, i64(member))), b.mul(i, i64(4)))
                    weight = ops.spread(ops.load(at, i32))
                    done += [ops.dot(sums[member * 2 + half], halves[half], weight) for half in range(2)]
                return done

            sums = ops.loop(b.sdiv(keys, i64(2)), [ops.load(at) for at in outs], two)
            for total, at in zip(sums, outs, strict=True):
                ops.store(total, at)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return mix


weigh: Any = intrinsic(_weigh)
score_row, score_float_row = _score_rows(pairs=True), _score_rows(pairs=False)
mix_1, mix_2, mix_3, mix_4 = (_mix_rows(members) for members in (1, 2, 3, 4))
score_floats, score_pairs = _product(pairs=False, onto=False), _product(pairs=True, onto=False)
mix_floats, mix_pairs = _product(pairs=False, onto=True), _product(pairs=True, onto=True)
