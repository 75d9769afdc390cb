"""What clients hint about their prompts, and what stays longer for it, within a budget and for a time.

Hints are never looked at when a request is looked up: they only decide what goes first where room is short.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

from protocol.messages import Generate
from worker.slots import Snapshot
from worker.snapshot_index import Node
from worker.snapshots import SnapshotStore

BUDGET = 4  # one in so many slots, blocks and recurrent states may be held back by hints
HEAD_TIMES = 12  # a mark on a head holds for so many times its own time: many conversations begin with one


class Kept(NamedTuple):
    """The slots that hints speak for now. `held` stay where anything else can go, `named` only count for more."""

    held: frozenset[int]
    named: frozenset[int]


class Retention:
    """Writes hints to snapshots, and reads from them which ones are held back."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store

    def note(self, message: Generate) -> None:
        """Tell the snapshots at a request's boundaries what its client hints."""
        hint, store = message.hint, self._store
        if hint is None or not len(store.slots):
            return
        seconds = {mark.end: mark.seconds for mark in hint.marks}
        for node in store.index.walk(message.tenant, message.token_ids.tobytes(), message.boundaries).chain:
            snapshot = None if node.slot is None else store.slots[node.slot].snapshot
            if snapshot is None or snapshot.node is not node:
                continue  # a stale entry: the lookup will drop it
            snapshot.session = hint.session or snapshot.session
            snapshot.hold_seconds = max(seconds.get(node.end, 0), snapshot.hold_seconds)

    def held(self) -> frozenset[int]:
        """The slots that are held back now. Where a request cannot be served otherwise, they go like others."""
        return self.kept().held

    def kept(self) -> Kept:
        """What hints speak for: all that was used within the time of its mark, then snapshots of named sessions.

        Of either the last used first, as far as the one budget for both goes.
        """
        snapshots = [s for s in self._store.slots.snapshots() if not s.leaving and (s.hold_seconds or s.session)]
        if not snapshots:
            return Kept(frozenset(), frozenset())
        now, room = self._store.clock(), _Room(self._store)
        held = room.take(s for s in snapshots if now - _used_at(s.node) < hold_seconds(s))
        return Kept(held, room.take(s for s in snapshots if s.session and s.slot not in held))


class _Room:
    """What is left of the budget."""

    def __init__(self, store: SnapshotStore) -> None:
        self._slots = len(store.slots) // BUDGET
        if store.states is not None:
            self._slots = min(self._slots, store.states.total_count // BUDGET)
        self._most_blocks = store.pool.total_count // BUDGET
        self._blocks: set[int] = set()

    def take(self, snapshots: Iterable[Snapshot]) -> frozenset[int]:
        """The slots of those for which there is room, the last used first.

        Of a conversation that is its head, and then the deepest, which stands for those it was built on.
        """
        taken: set[int] = set()
        for snapshot in sorted(snapshots, key=_order):
            if not self._slots:
                break
            # Blocks are shared from the start on, and looked at from the end.
            own = list(takewhile(lambda block: block not in self._blocks, reversed(snapshot.blocks)))
            if len(self._blocks) + len(own) <= self._most_blocks:
                self._slots -= 1
                taken.add(snapshot.slot)
                self._blocks.update(own)
        return frozenset(taken)


def hold_seconds(snapshot: Snapshot) -> float:
    """How long after its last use a mark holds it; 0 where there is none."""
    return snapshot.hold_seconds * (HEAD_TIMES if snapshot.node.kind == "head" else 1)


def _order(snapshot: Snapshot) -> tuple[float, bool, int]:
    return -_used_at(snapshot.node), snapshot.node.kind != "head", -snapshot.tokens


def _used_at(node: Node) -> float:
    """As eviction has it: a snapshot that was passed is not used by what is built on it. A head is."""
    return node.asked_at if node.snapshots_below and node.kind != "head" else node.used_at
