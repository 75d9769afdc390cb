"""The checker, on stores that were broken by hand."""

from __future__ import annotations

import pytest
from snapshot_rig import Engine, one_shot

from worker.invariants import InvariantViolation


def broken(engine: Engine, fault: str) -> None:
    store = engine.store
    first, second = store.slots.snapshots()[:2]
    match fault:
        case "two entries for one slot":
            second.node.slot, second.node.generation = first.slot, 1
        case "older generation":
            store.slots[first.slot].generation += 1
        case "entry of a free slot":
            store.slots.begin_evict(first.slot)
            store.slots.finish_evict(first.slot)
        case "longer key":
            first.tokens -= 1
        case "too few blocks":
            first.blocks = first.blocks[:-1]
        case "ids of another length":
            first.node.ids += bytes(4)
        case "a free block":
            engine.pool.release(first.blocks)
        case "a lost slot":
            store.slots._free.pop()
        case "a reader too many":
            store.slots[first.slot].readers += 1
        case "bytes not counted":
            store.held_count += 1
        case "a reference too many":
            engine.pool.share(first.blocks)
        case "ghosts not counted":
            store.index.ghost_bytes += 1


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("two entries for one slot", 1),
        ("older generation", 1),
        ("entry of a free slot", 3),
        ("longer key", 2),
        ("too few blocks", 2),
        ("ids of another length", 2),
        ("a free block", 3),
        ("a lost slot", 4),
        ("a reader too many", 6),
        ("bytes not counted", 10),
        ("a reference too many", 10),
        ("ghosts not counted", 10),
    ],
)
def test_the_checker_names_the_invariant_that_does_not_hold(fault, number):
    engine = Engine(3)
    engine.play(one_shot(1))
    engine.play(one_shot(2))
    broken(engine, fault)
    with pytest.raises(InvariantViolation, match=f"invariant {number}: ") as caught:
        engine.store.check_invariants([])
    assert caught.value.number == number
