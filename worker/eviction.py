"""Which snapshots go when slots or KV blocks are short: pure functions over candidates.

A snapshot is worth what it would cost to compute again, times how likely it is to be asked for soon: that follows
from the share of its like that is asked for at all (`returns.py`) and from the idle time, measured in pauses as its
conversation makes them, or others do while it has made few. So one-shots go before sessions of the same size and age,
short ones before long ones, and what nobody has asked for in a thousand pauses goes at last, however long it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from worker.returns import PAUSE_SECONDS

SURPLUS = 16  # what comes free beyond a need is of use up to one in so many blocks: others will need it soon
SMALL_PART = 1 / 8  # a new conversation that saves less than this part of what it would push out is not kept
# Where attention over the prefix costs as much as the rest of a token: 30k where all layers attend (an 8B shape,
# measured), three times as much and more where they recur, and those are short of slots first.
QUADRATIC_TOKENS = 131072


class Candidate(NamedTuple):
    """A snapshot as eviction sees it. `parent` is the slot of the nearest shallower one of its conversation."""

    slot: int
    parent: int | None
    start: int  # tokens that the parent holds
    end: int
    interior: bool  # a deeper snapshot extends it, and not only an unproven one
    passed: bool  # asked for once, by the request that went on from it: the next will ask for what that left
    share: float  # of the boundaries like this one that are asked for again
    unproven: bool  # an absorbed answer that nobody has started from
    idle_seconds: float  # since a request started from it; where nothing was built on it, since one had it
    last_used: int
    blocks: Sequence[int]
    pause: float  # typical seconds between two requests of its conversation
    fixed: bool  # in use, pinned or protected: stays
    end_share: float = 0.0  # of those like the end that was last begun on it, where no snapshot is left of that
    end_idle_seconds: float = 0.0  # since a request had that end


def recompute_cost(start: int, end: int) -> float:
    """What computing [start, end) costs, in tokens without a prefix."""
    return (end - start) + (end * end - start * start) / (2 * QUADRATIC_TOKENS)


def choose_for_slot(
    candidates: Iterable[Candidate],
    newcomer: float | None = None,
    *,
    share: float = 1.0,
    extends: bool = False,
    unproven: bool = False,
) -> int | None:
    """The slot that a new snapshot may take; None if all stay.

    Absorbed answers that were never hit go first, then what is worth least: as a rule what was passed, which stays
    where conversations have been seen to go back. One that is `unproven` itself takes the place of no other.

    A newcomer (its cost to compute again, and the `share` of its like that is asked for) that `extends` another, or
    stands inside a prompt, is not kept where it would be worth less than all others. Nor does any newcomer that is
    small beside a snapshot take its place, unless that was passed.
    """
    going = [candidate for candidate in candidates if not candidate.fixed]
    first = [c for c in going if c.unproven or (unproven and was_passed(c))]
    if first:
        return min(first, key=lambda c: (_cost(c) * _late(c.idle_seconds, c.pause), c.last_used)).slot
    if unproven:
        return None
    for victim in sorted(going, key=lambda c: (value_of(c), c.last_used)):
        if newcomer is None:
            return victim.slot
        if extends and newcomer * share < value_of(victim):
            return None
        # However fast others go on: a session that rests for minutes is not pushed out by what is small.
        least = SMALL_PART * _cost(victim) * _late(victim.idle_seconds, max(victim.pause, PAUSE_SECONDS))
        if newcomer >= least or was_passed(victim):
            return victim.slot
    return None


def choose_for_blocks(
    candidates: Collection[Candidate],
    blocks_needed: int,
    refcounts: Sequence[int],
    *,
    divisible: bool = False,
) -> list[int] | None:
    """The slots to empty, in order, for `blocks_needed` blocks to come free; None if all together free fewer.

    Absorbed answers that were never hit go first, then leaves and what holds a last block of its own before what they
    extend, cheapest first per block that comes free and is of use: see `SURPLUS`. `divisible`: of the last one only
    the end goes, so that any block costs what its own tokens do. Only blocks that nobody else holds come free.
    """
    parents = {candidate.slot: candidate.parent for candidate in candidates}
    left: dict[int | None, Candidate] = {candidate.slot: candidate for candidate in candidates}
    extended = dict.fromkeys(left, 0)
    for candidate in candidates:
        if candidate.parent in extended:
            extended[candidate.parent] += 1

    asks = {candidate.slot: asks_for(candidate) for candidate in candidates}

    most = max(blocks_needed, len(refcounts) // SURPLUS)

    # What extends others stands behind all leaves, and once more when nothing extends it any more. A loss is no more
    # than a bound until its blocks are counted, as those of few have to be.
    def bound(candidate: Candidate) -> float:
        above = left.get(candidate.parent)
        own = len(candidate.blocks) - (max(len(above.blocks) - 1, 0) if above else 0)
        return loss(candidate, min(max(own, 1), most))

    def loss(candidate: Candidate, own: int) -> float:
        """For each of the blocks that come free and are of use."""
        each = 1 + candidate.end / QUADRATIC_TOKENS if divisible else _cost(candidate) / max(own, 1)
        return each * asks[candidate.slot]

    def is_needed(candidate: Candidate) -> bool:
        """By others that extend it, all of it. Whoever goes on from it has copied a last block that is half full."""
        return extended[candidate.slot] > 0 and not _tail_blocks(candidate.blocks, refcounts, released, 1)

    released: dict[int, int] = {}
    order = [_place(c, is_needed(c), bound(c)) for c in candidates if not c.fixed]
    heapify(order)
    chosen: list[Candidate] = []
    while blocks_needed > 0 and order:
        place = heappop(order)
        victim = left.get(place.slot)
        if victim is None:
            continue
        now = _place(
            victim, is_needed(victim), loss(victim, _tail_blocks(victim.blocks, refcounts, released, most))
        )
        if now > place:
            heappush(order, now)
            continue
        del left[victim.slot]
        chosen.append(victim)
        for block in victim.blocks:
            released[block] = released.get(block, 0) + 1
            if released[block] == refcounts[block]:
                blocks_needed -= 1
        above = parents[victim.slot]
        while above is not None and above not in left:
            above = parents.get(above)
        parent = left.get(above)
        if parent is not None:
            asks[parent.slot] += asks[victim.slot]  # who asks for the one that goes starts from the other
            extended[parent.slot] += extended[victim.slot] - 1
            if not extended[parent.slot] and not parent.fixed and blocks_needed > 0:
                heappush(order, _place(parent, False, bound(parent)))
    if blocks_needed > 0:
        return None
    freed = {block for block, count in released.items() if count == refcounts[block]}
    return [victim.slot for victim in chosen if not freed.isdisjoint(victim.blocks)]


class _Place(NamedTuple):
    """Where a candidate stands in the order of going."""

    is_needed: bool
    proven: bool
    loss: float
    last_used: int
    slot: int


def _place(candidate: Candidate, is_needed: bool, loss: float) -> _Place:
    return _Place(is_needed, not candidate.unproven, loss, candidate.last_used, candidate.slot)


def was_passed(candidate: Candidate) -> bool:
    return candidate.interior and candidate.passed


def value_of(candidate: Candidate) -> float:
    """Its cost to compute again, times how many times it is to be started from."""
    return _cost(candidate) * asks_for(candidate)


def asks_for(candidate: Candidate) -> float:
    """How many times it is to be started from, the later the less."""
    asks = _asks(candidate.share, candidate.idle_seconds, candidate.pause)
    if candidate.end_share:
        asks += _asks(candidate.end_share, candidate.end_idle_seconds, candidate.pause)
    return asks


def _asks(share: float, idle_seconds: float, pause: float) -> float:
    """How many times a boundary is to be asked for from now on, the later the less.

    Of what is asked for at all, a part is late and still to come; all the rest of what has been idle for as long is
    never asked for. The later, the longer it will take besides.
    """
    late = _late(idle_seconds, pause)
    still = share * late
    if not still:  # idle for ever: not used since the start
        return 0.0
    return late * still / (still + (1.0 - share))


def _cost(candidate: Candidate) -> float:
    return recompute_cost(candidate.start, candidate.end)


def _late(idle_seconds: float, pause: float) -> float:
    """The part of what is asked for again that is so after a longer time than it has been idle by now."""
    return pause / (pause + idle_seconds)


def _tail_blocks(blocks: Sequence[int], refcounts: Sequence[int], released: dict[int, int], most: int) -> int:
    """How many blocks at the end only this snapshot holds: what it shares, it shares from the start on.

    Counted up to `most`. The last one may be shared with a sequence that has not written on yet; it is skipped then.
    An estimate for the order only, but one that costs no more than the blocks that are really its own.
    """
    own = 0
    for place in range(len(blocks) - 1, -1, -1):
        block = blocks[place]
        if refcounts[block] - released.get(block, 0) == 1:
            own += 1
            if own == most:
                break
        elif place < len(blocks) - 1:
            break
    return own
