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
    ends: list[int]
    digests: list[bytes]


class Chains:
    """Safe to use from several threads."""

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self._recent: Recent[_Key, _Chain] = Recent(max_bytes)

    def boundaries(self, root: bytes, token_ids: array[int], cuts: Sequence[Cut]) -> tuple[Boundary, ...]:
        """Boundaries for cuts that rise in token positions above 0."""
        if not cuts:
            return ()
        ends = [cut.end for cut in cuts]
        ids = token_ids[: ends[-1]].tobytes()
        keys = [(root, end, ids[4 * max(end - _TAIL, 0) : 4 * end]) for end in ends[-_TRIED:]]
        digests = self._beginning(ids, ends, keys)
        known = len(digests)
        if known < len(ends):
            start, parent = (ends[known - 1], digests[-1]) if known else (0, root)
            digests += chain_digests(parent, token_ids[start:], [end - start for end in ends[known:]])
        self._recent.keep(_Chain(ids, ends, digests), keys[-_KEYS:], len(ids) + 100 * len(ends) + 500)
        return tuple(
            Boundary(cut.end, digest, cut.kind, cut.messages) for cut, digest in zip(cuts, digests, strict=True)
        )

    def _beginning(self, ids: bytes, ends: list[int], keys: Sequence[_Key]) -> list[bytes]:
        """The digests of the longest known beginning."""
        for key in reversed(keys):
            chain = self._recent.get(key)
            if chain is None:
                continue
            count, size = ends.index(key[1]) + 1, 4 * key[1]
            if chain.ends[:count] == ends[:count] and chain.ids[:size] == ids[:size]:
                return chain.digests[:count]
        return []
