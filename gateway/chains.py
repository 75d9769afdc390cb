"""Digest chains that were computed lately, so that a longer prompt's chain goes on from one of them.

Digests are a chain over all ids, and an agent sends its whole history each turn. Comparing it with what came before
costs a tenth of hashing it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gateway.boundaries import Cut
from gateway.recent import Recent
from protocol.digest import chain_digests
from protocol.messages import Boundary

_HELD_BYTES = 32 << 20
_TRIED = 16  # cuts, from the last one back, at which a chain may go on from another
_KEYS = 4  # cuts, from the last one back, by which one can be found: its end may be said differently
_TAIL = 8  # ids before a cut by which chains are told apart before all are compared


_Key = tuple[bytes, int, bytes]


class _Chain(NamedTuple):
    ids: bytes  # up to the last cut
    cuts: list[Cut]
    ends: list[int]
    boundaries: tuple[Boundary, ...]


class Chains:
    """Safe to use from several threads."""

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self._recent: Recent[_Key, _Chain] = Recent(max_bytes)

    def boundaries(self, root: bytes, token_ids: array[int], cuts: Sequence[Cut]) -> tuple[Boundary, ...]:
        """Boundaries for cuts that rise in token positions above 0."""
        if not cuts:
            return ()
        cuts = list(cuts)
        ends = [cut.end for cut in cuts]
        ids = memoryview(token_ids)[: ends[-1]].tobytes()
        keys = [(root, end, ids[4 * max(end - _TAIL, 0) : 4 * end]) for end in ends[-_TRIED:]]
        boundaries = self._beginning(ids, cuts, ends, keys)
        known = len(boundaries)
        if known < len(ends):
            start, parent = (ends[known - 1], boundaries[-1].digest) if known else (0, root)
            digests = chain_digests(parent, token_ids[start:], [end - start for end in ends[known:]])
            boundaries += tuple(map(_boundary, cuts[known:], digests))
        size = len(ids) + 200 * len(ends) + 500
        self._recent.keep(_Chain(ids, cuts, ends, boundaries), keys[-_KEYS:], size)
        return boundaries

    def _beginning(
        self, ids: bytes, cuts: list[Cut], ends: list[int], keys: Sequence[_Key]
    ) -> tuple[Boundary, ...]:
        """The boundaries of the longest known beginning."""
        for key in reversed(keys):
            chain = self._recent.get(key)
            if chain is None:
                continue
            count, size = ends.index(key[1]) + 1, 4 * key[1]
            if chain.ends[:count] != ends[:count] or chain.ids[:size] != ids[:size]:
                continue
            known = chain.boundaries[:count]
            if chain.cuts[:count] == cuts[:count]:
                return known
            return tuple(map(_boundary, cuts, (each.digest for each in known)))
        return ()


def _boundary(cut: Cut, digest: bytes) -> Boundary:
    return Boundary(cut.end, digest, cut.kind, cut.messages)
