"""Where the threads of one kernel wait for each other, too often for the system's help: 150 times a step of 6 ms."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_SPINS = 2000  # looks at the counter, some 30 us, before the core is offered to whom the others may be waiting for


def _meet(_: Any, counter: Any, goal: Any) -> Any:
    """Add one to the int64 at address `counter`, and return once it is `goal` or more.

    What each thread wrote before it came is seen by all after they have met. A counter begins at 0, and the n-th
    meeting of p threads has goal n * p.
    """

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        counter, goal = args
        wide = ir.IntType(64)
        at = b.inttoptr(counter, wide.as_pointer())
        b.atomic_rmw("add", at, wide(1), "seq_cst")
        before = b.block
        look, wait = b.append_basic_block("look"), b.append_basic_block("wait")
        offer, after = b.append_basic_block("offer"), b.append_basic_block("after")
        b.branch(look)
        b.position_at_end(look)
        looks = b.phi(wide)
        looks.add_incoming(wide(0), before)
        come = b.load_atomic(at, "acquire", 8, typ=wide)
        b.cbranch(b.icmp_signed(">=", come, goal), after, wait)
        b.position_at_end(wait)
        b.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "pause", "", side_effect=True), [])
        more = b.add(looks, wide(1))
        looks.add_incoming(more, wait)
        b.cbranch(b.icmp_signed(">", more, wide(_SPINS)), offer, look)
        b.position_at_end(offer)
        kind = ir.FunctionType(ir.IntType(32), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])  # type: ignore[no-untyped-call]
        looks.add_incoming(wide(0), offer)
        b.branch(look)
        b.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


meet: Any = intrinsic(_meet)
