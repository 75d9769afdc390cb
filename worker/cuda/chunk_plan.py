"""Where the chunks of a prefill pass lie, and whose states it reads and writes: what the delta rule's kernels go by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.steps import StateUse

CHUNK = 64
"""Rows of a chunk, fewer before a boundary and at a prompt's end."""
_HEADER = 4


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunks of `rows` rows: chunk i is rows [starts[i], starts[i + 1]).

    The first begins in the state of entry `source`, and the state after the last goes to `entry`. After its chunk
    i the state goes to `targets[i]`, unless that is -1, and from there to each of `copies` (from, to) that are from it.
    """

    starts: tuple[int, ...]
    source: int
    entry: int
    targets: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rows: int, use: StateUse) -> ChunkPlan:
        """That of a pass of `rows` tokens. Raises `ValueError` for captures where no chunk ends."""
        starts = [*chunk_starts(rows, use.cuts), rows]
        places = {end: index for index, end in enumerate(starts[1:])}
        targets, copies = [-1] * len(places), []
        for end, target in use.captures:
            if end not in places:
                raise ValueError(f"a state after {end} rows is not at the end of a chunk of {starts}")
            first = targets[places[end]]
            if first < 0:
                targets[places[end]] = target
            else:
                copies.append((first, target))
        source = use.entry if use.source is None else use.source
        return cls(tuple(starts), source, use.entry, tuple(targets), tuple(copies))

    @property
    def chunks(self) -> int:
        return len(self.targets)

    def pack(self, capacity: int, out: NDArray[np.int32]) -> None:
        """Write it to the first `plan_size(capacity)` numbers of `out`, as kernels read it, with room for `capacity`.

        Number of chunks, source, entry, number of states kept; starts; targets; then (rows, entry) of each state
        kept, the sequence's own last.
        """
        chunks, saves_at = self.chunks, saves_start(capacity)
        saves = [(self.starts[i + 1], target) for i, target in enumerate(self.targets) if target >= 0]
        saves.append((self.starts[-1], self.entry))
        out[:_HEADER] = chunks, self.source, self.entry, len(saves)
        out[_HEADER : _HEADER + chunks + 1] = self.starts
        out[targets_start(capacity) : targets_start(capacity) + chunks] = self.targets
        out[saves_at : saves_at + 2 * len(saves)] = np.array(saves, np.int32).ravel()


def chunk_starts(rows: int, cuts: Iterable[int]) -> list[int]:
    """Where chunks begin in a pass of `rows` rows with boundaries after `cuts` of them, rising: anew at each."""
    starts: list[int] = []
    begin = 0
    for end in (*cuts, rows):
        starts.extend(range(begin, end, CHUNK))
        begin = end
    return starts


def targets_start(capacity: int) -> int:
    """Where the targets of a packed plan begin."""
    return _HEADER + capacity + 1


def saves_start(capacity: int) -> int:
    """Where the states kept of a packed plan begin."""
    return targets_start(capacity) + capacity


def plan_size(capacity: int) -> int:
    """Numbers of a packed plan with room for `capacity` chunks."""
    return saves_start(capacity) + 2 * (capacity + 1)
