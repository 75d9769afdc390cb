"""What clients hint about their prompts, and the snapshots that stay longer for it, within a budget.

Hints are never looked at when a request is looked up: they only decide what goes first where room is short.
"""

from __future__ import annotations

from itertools import takewhile

from protocol.messages import Generate
from worker.slots import Snapshot
from worker.snapshot_index import Node
from worker.snapshots import SnapshotStore

BUDGET = 4  # one in so many slots, blocks and recurrent states may be held back by hints


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
        """The slots that are held back now: marked heads, then what was used within the time of its mark.

        Of either the last used first, as far as the budget goes. Where a request cannot be served otherwise, they
        go like others.
        """
        store, now = self._store, self._store.clock()
        marked = [
            snapshot
            for snapshot in store.slots.snapshots()
            if snapshot.hold_seconds
            and not snapshot.leaving
            and (_is_head(snapshot) or now - _used_at(snapshot.node) < snapshot.hold_seconds)
        ]
        most = len(store.slots) // BUDGET
        if store.states is not None:
            most = min(most, store.states.total_count // BUDGET)
        most_blocks = store.pool.total_count // BUDGET
        held: set[int] = set()
        blocks: set[int] = set()
        # Using a snapshot uses those above it too: the deepest of a conversation stands for it.
        for snapshot in sorted(marked, key=lambda s: (not _is_head(s), -s.node.last_used, -s.tokens)):
            if len(held) >= most:
                break
            # Blocks are shared from the start on, and looked at from the end.
            own = list(takewhile(lambda block: block not in blocks, reversed(snapshot.blocks)))
            if len(blocks) + len(own) <= most_blocks:
                held.add(snapshot.slot)
                blocks.update(own)
        return frozenset(held)


def _used_at(node: Node) -> float:
    """As eviction has it: a snapshot that was passed is not used by what is built on it."""
    return node.asked_at if node.snapshots_below else node.used_at


def _is_head(snapshot: Snapshot) -> bool:
    return snapshot.node.kind == "head"
