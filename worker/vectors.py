"""Vector instructions for kernels, generated as LLVM code.

Numba leaves it to the compiler whether a loop's sums live in registers, and measured, they did not: 40 GFLOP/s a
core where whole vectors reach 100. So the inner loops are put together from what is here, as intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils

_cpu = llvmlite.binding.get_host_cpu_features()

HAS_PAIRS = bool(_cpu.get("avx512bf16", False))
"""Whether this processor multiplies pairs of bfloat16, as `Vectors.dot` does."""
HAS_WIDE = bool(_cpu.get("avx512f", False))
"""Whether it has 32 registers of 512 bits, and looks up single numbers in one as `Vectors.numbers` does."""

WIDTH = 16
"""Numbers of 32 bits in a vector."""
VECTOR_BYTES = WIDTH * 4
# 2 ** r for |r| <= 1/2, highest power first: the Taylor series of e ** (r ln 2), off by 2e-8 of the value at most.
_EXP2 = (1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2,
         2.402265069591007e-1, 6.931471805599453e-1, 1.0)  # fmt: skip
_EXP2_LEAST = -126.0
# Levels 0 to 15 as bfloat16, twice: what lies in the bit above a level's four does not matter.
_LEVELS = [int(bits) for bits in np.arange(16, dtype=np.float32).view(np.uint32) >> 16] * 2

f32, i8, i16, i32, i64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(f32, WIDTH), ir.VectorType(i32, WIDTH)

# The bfloat16 product is an instruction that LLVM knows by changing names: it is written as text.
llvmlite.binding.initialize_native_asmparser()


class Vectors:
    """Vector instructions at the place where `builder` stands."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, address: ir.Value, offset: int) -> ir.Value:
        return self.b.add(address, i64(offset))

    def load(self, address: ir.Value, kind: ir.Type = FLOATS) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=2, typ=kind)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def spread(self, number: ir.Value) -> ir.Value:
        """`number` in every lane."""
        kind = ir.VectorType(number.type, WIDTH)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), number, i32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(INTS, [0] * WIDTH))

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
        exponent = self.b.shl(self.b.fptosi(whole, INTS), ir.Constant(INTS, [23] * WIDTH))
        return self.b.bitcast(self.b.add(self.b.bitcast(value, INTS), exponent), FLOATS)

    def pair(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """Two vectors of float32 as one of bfloat16 pairs, rounded to nearest even."""
        b, half = self.b, ir.Constant(INTS, [16] * WIDTH)

        def rounded(value: ir.Value) -> ir.Value:
            bits = b.bitcast(value, INTS)
            odd = b.and_(b.lshr(bits, half), ir.Constant(INTS, [1] * WIDTH))
            return b.add(b.add(bits, ir.Constant(INTS, [0x7FFF] * WIDTH)), odd)

        upper = b.and_(rounded(high), ir.Constant(INTS, [-0x10000] * WIDTH))
        return b.or_(b.lshr(rounded(low), half), upper)

    def dot(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """total + x[0] * y[0] + x[1] * y[1] for the pairs of bfloat16 in each lane.

        In other bits where the processor has no instruction for it: both forms of a kernel are compiled everywhere.
        """
        if not HAS_PAIRS:
            half, upper = ir.Constant(INTS, [16] * WIDTH), ir.Constant(INTS, [-0x10000] * WIDTH)
            low = [self.b.bitcast(self.b.shl(pairs, half), FLOATS) for pairs in (x, y)]
            high = [self.b.bitcast(self.b.and_(pairs, upper), FLOATS) for pairs in (x, y)]
            return self.call("fma", *high, self.call("fma", *low, total))
        kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
        return self.b.call(ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, x, y])

    def levels(self, address: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Levels as pairs of bfloat16, from the lower and from the upper halves of 32 bytes."""
        words = ir.VectorType(i16, 2 * WIDTH)
        levels = self.b.zext(self.load(address, ir.VectorType(i8, 2 * WIDTH)), words)
        upper = self.b.lshr(levels, ir.Constant(words, [4] * 2 * WIDTH))
        name = "llvm.x86.avx512.permvar.hi.512"
        kind = ir.FunctionType(words, [words, words])
        look_up = cgutils.get_or_insert_function(self.b.module, kind, name)  # type: ignore[no-untyped-call]
        table = ir.Constant(words, _LEVELS)
        return tuple(self.b.bitcast(self.b.call(look_up, [table, at]), INTS) for at in (levels, upper))

    def number(self, levels: ir.Value) -> ir.Value:
        """The lowest four bits of each lane as float32."""
        name = "llvm.x86.avx512.permvar.sf.512"
        kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
        look_up = cgutils.get_or_insert_function(self.b.module, kind, name)  # type: ignore[no-untyped-call]
        return self.b.call(look_up, [ir.Constant(FLOATS, [float(level) for level in range(16)]), levels])

    def halves(self, address: ir.Value) -> ir.Value:
        """A vector of float32 from float16 in memory."""
        return self.b.fpext(self.load(address, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)

    def added_up(self, rows: list[ir.Value]) -> ir.Value:
        """The sum of the lanes of each of 16 vectors, in the lane of its number."""
        width = WIDTH // 2
        while width:
            # Halve the vectors: each new one holds the half sums of two, in runs of `width` lanes.
            lanes = range(WIDTH)
            first = [lane // width * 2 * width + lane % width for lane in lanes]
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [
                self.b.fadd(
                    self.b.shuffle_vector(x, y, ir.Constant(INTS, first)),
                    self.b.shuffle_vector(x, y, ir.Constant(INTS, [lane + width for lane in first])),
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
        i = self.b.phi(i64)
        i.add_incoming(i64(0), before)
        carried = []
        for value in start:
            phi = self.b.phi(value.type)
            phi.add_incoming(value, before)
            carried.append(phi)
        results = body(i, carried)
        following = self.b.add(i, i64(1))
        i.add_incoming(following, block)
        for phi, result in zip(carried, results, strict=True):
            phi.add_incoming(result, block)
        self.b.cbranch(self.b.icmp_signed("<", following, count), block, after)
        self.b.position_at_end(after)
        return results


def all_lanes(number: float) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(FLOATS, [number] * WIDTH)
