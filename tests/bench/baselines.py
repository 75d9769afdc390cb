"""What other caches would reuse of a workload: one without limits, and two that forget what was not used longest."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
from workloads import Turn


def infinite(turns: Sequence[Turn]) -> int:
    """Tokens reused by blocks of fixed size that are never forgotten."""
    return block_lru(turns, None)


def block_lru(turns: Sequence[Turn], capacity_tokens: int | None) -> int:
    """Tokens reused by blocks of fixed size; of one prompt the last ones go first.

    A prompt that does not fit at all is not played. A trace that tells blocks of more than 16 tokens is played with
    those: no difference but at the ends of prompts.
    """
    if not turns:
        return 0
    size = turns[0].block_tokens
    capacity = None if capacity_tokens is None else capacity_tokens // size
    _, places = np.unique(np.concatenate([turn.keys for turn in turns]), return_inverse=True)
    used = np.full(int(places.max(initial=-1)) + 1, -1, np.int64)  # number of the last turn that used a block
    held = np.zeros(len(used), bool)
    held_count = reused = start = 0
    queue: deque[tuple[int, np.ndarray]] = deque()  # what each turn used, oldest first; may have been used since
    for number, turn in enumerate(turns):
        blocks = places[start : start + len(turn.keys)]
        start += len(turn.keys)
        if capacity_tokens is not None and turn.tokens > capacity_tokens:
            continue
        missing = np.flatnonzero(~held[blocks])
        found = int(missing[0]) if len(missing) else len(blocks)
        reused += min(found * size, turn.tokens - 1)
        held_count += int(np.count_nonzero(~held[blocks]))
        held[blocks] = True
        used[blocks] = number
        if capacity is None:
            continue
        queue.append((number, blocks))
        while held_count > capacity:
            when, oldest = queue.popleft()
            going = oldest[used[oldest] == when]
            cut = max(len(going) - (held_count - capacity), 0)
            held[going[cut:]] = False
            held_count -= len(going) - cut
            if cut:
                queue.appendleft((when, going[:cut]))
                used[going[cut:]] = -1
    return reused


def snapshot_lru(turns: Sequence[Turn], capacity: int, *, count_tokens: bool) -> int:
    """Tokens reused by one full copy of the state at each prompt's end.

    `capacity` counts snapshots, or with `count_tokens` the tokens that all of them hold; a prompt that does not fit
    is not played then.
    """
    kept: OrderedDict[bytes, int] = OrderedDict()
    held = reused = 0
    for turn in turns:
        if count_tokens and turn.tokens > capacity:
            continue
        for boundary in reversed(turn.boundaries):
            if boundary.end < turn.tokens and boundary.digest in kept:
                reused += boundary.end
                kept.move_to_end(boundary.digest)
                break
        if not turn.boundaries:
            continue
        newest = turn.boundaries[-1]
        weight = newest.end if count_tokens else 1
        if newest.digest not in kept and weight <= capacity:
            kept[newest.digest] = weight
            held += weight
        if newest.digest in kept:
            kept.move_to_end(newest.digest)
        while held > capacity:
            held -= kept.popitem(last=False)[1]
    return reused


def capacity_for(share: float, best: int, reused_at: Callable[[int], int], start: int) -> int | None:
    """The smallest capacity, to about one part in a hundred, at which `share` of `best` is reused; None: at none."""
    target = share * best
    high = start
    while reused_at(high) < target:
        if high > start << 40:
            return None
        high *= 4
    low = max(high // 4, 0)
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if reused_at(middle) >= target else (middle, high)
    return high
