"""The bounds against the best course of tiny workloads, found by trying all."""

from itertools import combinations

import numpy as np
from baselines import block_lru
from bounds import most_by_blocks, most_by_snapshots
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import Turn

from protocol.messages import Boundary

SIZE = 16

prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.booleans()), min_size=2, max_size=6
)


def turns_of(prompts):
    """Prompts of whole blocks, a boundary after each; one that goes `on` has some tokens after the last."""
    turns = []
    for at, (blocks, on) in enumerate(prompts):
        ends = range(1, len(blocks) + 1)
        names = [bytes([end, *blocks[:end]]) for end in ends]
        boundaries = tuple(
            Boundary(SIZE * end, name, "message", end) for end, name in zip(ends, names, strict=True)
        )
        keys = np.array([int.from_bytes(name) for name in names], np.uint64)
        ids = np.zeros(SIZE * len(blocks) + 5 * on, np.int32)
        turns.append(Turn(float(at), "", len(ids), ids.copy, boundaries, keys, SIZE))
    return turns


def subsets(items, most):
    return [frozenset(chosen) for count in range(most + 1) for chosen in combinations(sorted(items), count)]


def best_by_snapshots(turns, slots):
    """The most that can be saved, by what may be kept after each turn."""
    saved_with = {frozenset(): 0}
    for turn in turns:
        ends = {b.digest: b.end for b in turn.boundaries}
        after = {}
        for kept, saved in saved_with.items():
            depth = max((end for name, end in ends.items() if name in kept and end < turn.tokens), default=0)
            computed = {name for name, end in ends.items() if end > depth}
            for left in subsets(kept | computed, slots):
                after[left] = max(after.get(left, 0), saved + depth)
        saved_with = after
    return max(saved_with.values())


def best_by_blocks(turns, capacity):
    """The same for blocks, which are found up to the first that is missing, beside the prompt that runs."""
    saved_with = {frozenset(): 0}
    for turn in turns:
        names = turn.keys.tolist()
        if turn.tokens > capacity * SIZE:
            continue
        after = {}
        for kept, saved in saved_with.items():
            found = next((n for n, name in enumerate(names) if name not in kept), len(names))
            gained = saved + found * SIZE
            for beside in subsets(kept - set(names), capacity - len(names)):
                for left in subsets(beside | set(names), capacity):
                    after[left] = max(after.get(left, 0), gained)
        saved_with = after
    return max(saved_with.values())


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, 3))
def test_no_course_of_snapshots_saves_more_than_the_bound(prompts, slots):
    turns = turns_of(prompts)
    best, bound = best_by_snapshots(turns, slots), most_by_snapshots(turns, slots)
    assert best <= bound <= best_by_snapshots(turns, 9)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, 5))
def test_the_best_course_of_blocks_is_found(prompts, capacity):
    turns = turns_of(prompts)
    assert most_by_blocks(turns, capacity * SIZE) == best_by_blocks(turns, capacity)


@settings(max_examples=60, deadline=None)
@given(prompts, st.integers(1, 5))
def test_no_order_of_forgetting_blocks_saves_more_than_the_bound(prompts, capacity):
    turns = turns_of(prompts)
    assert block_lru(turns, capacity * SIZE) <= most_by_blocks(turns, capacity * SIZE)


def test_the_bound_of_snapshots_tells_two_conversations_on_one_slot_from_two():
    turns = turns_of([([number % 2] * 3, True) for number in range(8)])
    assert most_by_snapshots(turns, 2) == best_by_snapshots(turns, 2) == 6 * 3 * SIZE
    assert best_by_snapshots(turns, 1) == 3 * 3 * SIZE
    assert most_by_snapshots(turns, 1) <= 3.1 * 3 * SIZE


def test_nothing_to_save_is_told_as_such():
    assert most_by_snapshots([], 3) == most_by_blocks([], 100) == 0
    assert most_by_snapshots(turns_of([([0], True), ([1], True)]), 3) == 0
