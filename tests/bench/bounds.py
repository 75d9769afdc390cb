"""What the best cache imaginable would reuse of a workload: one that knows all requests to come.

Nobody reaches these figures; they tell how much of a gap is the policy's. Both are upper bounds that hold for every
policy of the kind, not estimates.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from workloads import Turn

PRICE_STEPS = 1500  # on recorded traces the bound then lies within a thousandth of the linear programme's


def most_by_snapshots(turns: Sequence[Turn], slots: int) -> int:
    """Tokens that `slots` snapshots can save at most, whatever is kept and when.

    A snapshot that saves d tokens of a request has held a slot since its boundary was last passed. Give each moment
    between two requests any price for a slot, none below zero: if every request takes what saves most after prices,
    and all slots are paid for at all moments, no policy saves more than both sums together. (That is the dual of the
    linear programme in which parts of snapshots may be kept, and what was passed over may be kept anew.) The prices
    are sought by steps along the gradient; those found lowest count, and any are a true bound.
    """
    since, at, saved = _uses(turns)
    if not len(at):
        return 0
    firsts = np.flatnonzero(np.diff(at, prepend=-1))  # of each request, in the rows of `_uses`
    sizes = np.diff(np.append(firsts, len(at)))
    prices = np.zeros(len(turns))
    slope, spread = np.zeros(len(turns)), np.zeros(len(turns))
    first_step = float(saved.mean()) / (10 * max(slots, 1))
    least = np.inf
    for step in range(1, PRICE_STEPS + 1):
        paid = np.concatenate(([0.0], np.cumsum(prices)))
        gains = saved - (paid[at] - paid[since])
        best = np.maximum(np.maximum.reduceat(gains, firsts), 0.0)
        least = min(least, float(slots * prices.sum() + best.sum()))
        chosen = np.flatnonzero((gains == np.repeat(best, sizes)) & (gains > 0))
        chosen = chosen[np.diff(at[chosen], prepend=-1) > 0]
        changes = np.zeros(len(turns) + 1)
        np.add.at(changes, since[chosen], 1)
        np.add.at(changes, at[chosen], -1)
        unsold = slots - np.cumsum(changes)[:-1]
        slope = 0.9 * slope + 0.1 * unsold
        spread = 0.999 * spread + 0.001 * unsold**2
        size = first_step * (1 - step / (PRICE_STEPS + 1))
        move = slope / (1 - 0.9**step) / (np.sqrt(spread / (1 - 0.999**step)) + 1e-9)
        prices = np.maximum(prices - size * move, 0.0)
    return int(least + 1e-6 * len(turns))


def most_by_blocks(turns: Sequence[Turn], capacity_tokens: int) -> int:
    """Tokens that blocks of fixed size can save at most, where the prompt that runs is in the same memory.

    Exact in blocks: whenever room is short, the block goes that is needed latest. All blocks cost the same, and of one
    prompt the first is never needed later than the last. The last token of a prompt found whole, which must be
    computed nevertheless, is not taken off: a course that loses such blocks rather than others would gain by it.
    Prompts that do not fit are not played.
    """
    if not turns:
        return 0
    size = turns[0].block_tokens
    capacity = capacity_tokens // size
    needs = _next_needs(turns, capacity_tokens)
    held: dict[int, int] = {}  # blocks kept, by the number of the turn that needs them
    latest: list[int] = []  # heap of those numbers, the latest first
    held_count = reused = 0
    for number, turn in enumerate(turns):
        if turn.tokens > capacity_tokens:
            continue
        found = held.pop(number, 0)
        held_count -= found
        reused += found * size
        while (over := held_count - (capacity - len(turn.keys))) > 0:
            going = min(held[-latest[0]], over)
            held[-latest[0]] -= going
            held_count -= going
            if not held[-latest[0]]:
                del held[-heapq.heappop(latest)]
        for needed, count in needs[number]:
            if needed not in held:
                heapq.heappush(latest, -needed)
            held[needed] = held.get(needed, 0) + count
            held_count += count
    return reused


def _uses(turns: Sequence[Turn]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """What may save tokens: from which turn on it was kept, in which it is used, and how many tokens it saves.

    In order of use. Of the boundaries of one turn that were last passed at the same time the deepest is enough.
    """
    passed: dict[bytes, int] = {}
    rows: list[tuple[int, int, int]] = []
    for number, turn in enumerate(turns):
        known = [b for b in turn.boundaries if b.end < turn.tokens and b.digest in passed]
        rows += [(since, number, end) for since, end in {passed[b.digest]: b.end for b in known}.items()]
        passed.update(dict.fromkeys((boundary.digest for boundary in turn.boundaries), number))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2].astype(np.float64)


def _next_needs(turns: Sequence[Turn], capacity_tokens: int) -> list[list[tuple[int, int]]]:
    """For each turn, which later ones need blocks of it next, and how many each."""
    _, places = np.unique(np.concatenate([turn.keys for turn in turns]), return_inverse=True)
    needed = np.full(int(places.max(initial=-1)) + 1, -1, np.int64)
    needs: list[list[tuple[int, int]]] = [[] for _ in turns]
    end = len(places)
    for number in range(len(turns) - 1, -1, -1):
        turn = turns[number]
        blocks = places[end - len(turn.keys) : end]
        end -= len(turn.keys)
        if turn.tokens <= capacity_tokens:
            again = needed[blocks]
            turn_numbers, counts = np.unique(again[again >= 0], return_counts=True)
            needs[number] = list(zip(turn_numbers.tolist(), counts.tolist(), strict=True))
            needed[blocks] = number
    return needs
