"""The recurrent states of sequences: who has which entry, from where a pass goes on, and where it leaves copies.

A state is of exactly one position and cannot be cut shorter. So one that is to be kept is copied during the pass that
crosses its boundary (`commits.py`), and after a pass that failed the sequence's own entry is no state any more.
Entry 0 is the state before the first token; nobody writes to it. A model that does not recur has no entries: then all
of this does nothing, and there is always room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from protocol.messages import Boundary
from worker.block_pool import ZERO_BLOCK
from worker.sequences import Choice, Request
from worker.snapshot_clearing import Clearing
from worker.snapshots import SnapshotStore
from worker.steps import StateUse


class SequenceStates:
    """Takes entries for sequences and gives them back. `give_way` is that of `SequenceMemory`."""

    def __init__(self, store: SnapshotStore, give_way: Callable[[], bool] = lambda: False) -> None:
        self._pool = store.states
        self._clearing = Clearing(store)
        self._give_way = give_way

    @property
    def releases(self) -> int:
        """Rises with every entry that is given back."""
        return self._pool.releases if self._pool else 0

    @property
    def most(self) -> int | None:
        """How many sequences can be on the device; None where no entries are needed."""
        return self._pool.total_count if self._pool else None

    def room(self, count: int, protect: Collection[int] = frozenset()) -> bool:
        """Whether so many entries are free, or could be made free without the snapshots in `protect`."""
        if self._pool is None:
            return True
        if self._pool.free_count < count:
            self._give_way()
        return self._pool.free_count >= count or self._clearing.make_state_room(count, protect)

    def take(self, request: Request, source: int | None) -> None:
        """Entries for a request and its choices; there must be room.

        The first pass copies `source`, a reference to which is handed over: None for a start from nothing.
        """
        if self._pool is not None:
            request.entries = self._pool.allocate(request.message.n)
            request.entry_source = ZERO_BLOCK if source is None else source

    def release(self, source: int | None) -> None:
        """Give back a reference that a restore took."""
        if self._pool is not None and source is not None:
            self._pool.release([source])

    def use(self, request: Request, end: int) -> StateUse | None:
        """What the pass up to `end` does with states: it fills the entries of `request.captures` too."""
        if self._pool is None:
            return None
        source, request.entry_source = request.entry_source, None
        if source:
            self._pool.release([source])
        start = request.computed
        captures = [(b.end - start, kept.state) for b, kept in request.captures if kept.state is not None]
        if request.checkpoint is not None and request.checkpoint[0].end > start:
            captures.append((request.checkpoint[0].end - start, request.checkpoint[1]))
        own, *others = request.entries
        if end == request.total:
            captures += [(end - start, other) for other in others]
        cuts = tuple(b.end - start for b in request.message.boundaries if start < b.end < end)
        return StateUse(own, source, tuple(captures), cuts)

    def checkpoint(self, request: Request, boundary: Boundary | None) -> None:
        """Let the next pass keep the state at `boundary` in place of an earlier one; None lets that one go only.

        Should the prefill end early, a snapshot can be made of it. Nothing goes for it: only while other sequences
        would still find an entry does it take one.
        """
        if self._pool is None:
            return
        entry = None
        if request.checkpoint is not None:
            entry, request.checkpoint = request.checkpoint[1], None
        if boundary is not None and entry is None and self._pool.free_count > 1:
            (entry,) = self._pool.allocate(1)
        if entry is not None and boundary is not None:
            request.checkpoint = boundary, entry
        elif entry is not None:
            self._pool.release([entry])

    def drop(self, request: Request) -> None:
        """Give back what a request holds."""
        if self._pool is not None:
            self.checkpoint(request, None)
            self._pool.release([*request.entries, *([request.entry_source] if request.entry_source else [])])
            request.entries, request.entry_source = [], None

    def fork(self, request: Request) -> None:
        """Hand the entries over to the request's choices."""
        self.checkpoint(request, None)
        for choice, entry in zip(request.choices, request.entries, strict=False):
            choice.entry = entry
        request.entries = []

    def drop_choice(self, choice: Choice) -> int | None:
        """Give back what a choice holds, if anything. It may be copied as long as nothing else is written."""
        entry, choice.entry = choice.entry, None
        if self._pool is not None and entry is not None:
            self._pool.release([entry])
        return entry

    def take_for_choice(self, choice: Choice) -> None:
        """An entry for a choice that comes back; there must be room."""
        if self._pool is not None:
            (choice.entry,) = self._pool.allocate(1)
