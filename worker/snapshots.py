"""The snapshot store: slot table, index and references to KV blocks, kept consistent with one another.

Called from the engine loop only; every call leaves the store consistent, also one that raises. A snapshot holds
references to the blocks of its tokens and nothing is ever copied here: whoever continues from a block with other
holders copies it before writing.

What is done with it are three nouns, each in a file: finding, keeping and clearing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, Protocol, get_args

from protocol.messages import Boundary
from worker.block_pool import BlockPool
from worker.events import EventLog
from worker.invariants import check_invariants, check_states
from worker.returns import Returns
from worker.slots import EvictionCause, LeavingCause, Reservation, SlotState, SlotTable, Snapshot
from worker.snapshot_index import AbsentReason, Node, SnapshotIndex

GHOST_BYTES = 64 << 20

AbortCause = Literal["length", "duplicate", "collision", "no_slot", "no_state", "not_worth", "cancelled", "failed"]
StaleCause = Literal["tokens", "generation", "length", "fingerprint", "checksum", "verify"]
_ABSENT: dict[LeavingCause, AbsentReason] = {"flush": "flushed", "stale": "stale"}


class UnknownSlot(KeyError):
    """No snapshot in that slot."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.slot = slot

    def __str__(self) -> str:
        return f"slot {self.slot} holds no snapshot"


class SlowerTiers(Protocol):
    """What is told of snapshots, and keeps them in more places."""

    def kept(self, node: Node) -> None:
        """A snapshot of this boundary was published."""

    def forget(self, nodes: Collection[Node], reason: AbsentReason) -> None:
        """Nothing of these boundaries is to be found any more."""

    def refused(
        self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], depth: int
    ) -> tuple[int, AbsentReason] | None:
        """The deepest boundary deeper than `depth` that is there and must not be used, and why."""

    def where(self, node: Node) -> list[str]:
        """The tiers that have all that is needed of this boundary itself."""

    def can_restore(self, node: Node) -> bool:
        """Whether they have all that is needed of it and of what it extends."""

    def is_busy(self, node: Node) -> bool:
        """Whether it is being loaded."""

    def alone(self) -> set[Node]:
        """The boundaries without a snapshot that were kept there for their own sake."""

    def evict(self, nodes: Collection[Node], *, dry_run: bool = False, tier: str | None = None) -> int:
        """What only these boundaries need goes, or goes from one tier; returns the bytes that came free."""

    def flush(self, keep: Collection[Node], *, dry_run: bool = False) -> int:
        """Everything goes but what these boundaries need; returns the bytes that came free."""


class SnapshotStore:
    """What is held, its accounts, and how a snapshot comes in and goes. `slots` 0 disables it: nothing is kept.

    Counters only rise and have every cause from the start. `block_bytes` is the size of one block in all layers.
    """

    def __init__(
        self,
        slots: int,
        pool: BlockPool,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        ghost_bytes: int = GHOST_BYTES,
        *,
        divisible: bool = False,
        states: BlockPool | None = None,
        state_bytes: int = 0,
    ) -> None:
        """`divisible`: the state at a boundary is a part of the state at a later one, as where all layers attend.

        `states`: the entries of recurrent state, of `state_bytes` each, where some layers recur.
        """
        assert not (divisible and states), "a recurrent state cannot be divided"
        self.slots = SlotTable(slots)
        self.pool = pool
        self.block_bytes = block_bytes
        self.states = states
        self.state_bytes = state_bytes
        self.index = SnapshotIndex(ghost_bytes)
        self.clock = clock
        self.divisible = divisible
        self.returns = Returns()
        self.events = EventLog()
        self.tiers: SlowerTiers | None = None
        self.commits = 0
        self.aborts: dict[str, int] = dict.fromkeys(get_args(AbortCause), 0)
        self.evictions: dict[str, int] = dict.fromkeys(get_args(EvictionCause), 0)
        self.stale_drops: dict[str, int] = dict.fromkeys(get_args(StaleCause), 0)
        self.reservations: set[Reservation] = set()
        self.held = [0] * (pool.total_count + 1)  # snapshots that refer to a block
        self.held_count = 0  # blocks that any snapshot refers to

    # What there is

    def snapshot_in(self, slot: int) -> Snapshot | None:
        return self.slots[slot].snapshot if 0 <= slot < len(self.slots) else None

    def known(self, slot: int) -> Snapshot:
        snapshot = self.snapshot_in(slot)
        if snapshot is None:
            raise UnknownSlot(slot)
        return snapshot

    def stays(self, snapshot: Snapshot) -> bool:
        return snapshot.pinned or self.slots[snapshot.slot].state is not SlotState.READY

    def fault(self, node: Node) -> StaleCause | None:
        """What is wrong with the entry of a node that has a slot."""
        assert node.slot is not None
        row = self.slots[node.slot]
        snapshot = row.snapshot
        if snapshot is None or snapshot.node is not node or row.generation != node.generation:
            return "generation"
        if snapshot.tokens != node.stored or len(snapshot.blocks) != self.pool.blocks_for(node.stored):
            return "length"
        return None

    def slot_states(self) -> dict[str, int]:
        """Slots by state, every state present."""
        return self.slots.counts()

    @property
    def snapshot_count(self) -> int:
        return len(self.slots.snapshots())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the distinct blocks that snapshots hold, and of their recurrent states."""
        return self.held_count * self.block_bytes + self.snapshot_count * self.state_bytes

    def check_invariants(
        self, sequences: Iterable[Collection[int]] | None = None, states: Iterable[int] = ()
    ) -> None:
        """Raises `InvariantViolation`. `sequences`: the blocks of every other holder; None leaves them out.

        `states`: their entries of recurrent state.
        """
        check_invariants(self.slots, self.index, self.pool, self.held, self.held_count, self.reserved(), sequences)
        if sequences is not None:
            writing = [r.state for r in self.reservations if r.state is not None]
            check_states(self.slots, self.states, [*writing, *states])

    def reserved(self) -> list[int]:
        """The slots that open reservations have."""
        return [r.slot for r in self.reservations if r.slot is not None]

    # Coming and going

    def publish(
        self, reservation: Reservation, node: Node, slot: int, blocks: tuple[int, ...], tokens: int | None = None
    ) -> None:
        """Hand references that were taken over to a new snapshot in a slot that was begun.

        `tokens`: of these only, which end between the boundary before and this one.
        """
        tokens = node.end if tokens is None else tokens
        parts = [
            self.known(at.slot) for at in (node, *node.ancestors()) if at.slot is not None and not at.is_whole
        ]
        pinned = any(part.pinned for part in parts)
        for part in parts:
            self.retire(part, "replaced")  # all that it holds is in the new one
        held, fresh = self.held, 0
        for block in blocks:
            count = held[block]
            if not count:
                fresh += 1
            held[block] = count + 1
        self.held_count += fresh
        self.slots.publish(
            Snapshot(
                slot,
                node,
                blocks,
                tokens,
                self.clock(),
                reservation.absorbed,
                reservation.state,
                reservation.exact,
                session=next((part.session for part in parts if part.session), ""),
                hold_seconds=max((part.hold_seconds for part in parts), default=0.0),
            )
        )
        self.index.attach(node, slot, self.slots[slot].generation, tokens)
        if pinned:
            self.index.pin(node, pinned=True)
        self.reservations.remove(reservation)
        self.commits += 1
        self.events.add("commit", slot=slot, digest=node.digest, tokens=tokens)
        if self.tiers is not None and node.is_whole:
            self.tiers.kept(node)

    def shorten(self, snapshot: Snapshot, node: Node, tokens: int) -> None:
        """Put a snapshot of its first `tokens` tokens in its place. It must be idle, and divisible.

        `node` is the first boundary on the way to its own that is not before these.
        """
        kept = snapshot.blocks[: self.pool.blocks_for(tokens)]
        self.pool.share(kept)
        self.retire(snapshot, "blocks")
        slot = self.slots.reserve()
        assert slot is not None, "one has just become free"
        reservation = Reservation(slot, frozenset(), absorbed=snapshot.absorbed, exact=snapshot.exact)
        self.reservations.add(reservation)
        self.slots.begin_write(slot)
        self.publish(reservation, node, slot, kept, tokens)
        node.absent_reason = "evicted"  # where that is not all of it
        shorter = self.known(slot)
        shorter.session, shorter.hold_seconds = snapshot.session, snapshot.hold_seconds

    def drop_stale(self, node: Node, cause: StaleCause) -> None:
        """The entry is never found again. Its slot is freed unless it belongs to another entry by now."""
        self.count_stale(node, cause)
        assert node.slot is not None
        snapshot = self.slots[node.slot].snapshot
        if snapshot is not None and snapshot.node is node:
            self.retire(snapshot, "stale")
        else:
            self.index.detach(node, "stale")

    def count_stale(self, node: Node, cause: StaleCause) -> None:
        """An entry was found and refused."""
        self.stale_drops[cause] += 1
        self.events.add("stale", cause, slot=node.slot, digest=node.digest, tokens=node.end)

    def drop_clash(self, node: Node) -> bool:
        """Forget an entry whose digest names other ids, and what extends it. False where any of it is in use."""
        self.count_stale(node, "tokens")
        snapshots = [self.known(below.slot) for below in node.subtree() if below.slot is not None]
        if any(self.stays(snapshot) for snapshot in snapshots):
            return False
        self.remove([snapshot.slot for snapshot in snapshots], "stale")
        if self.tiers is not None:
            self.tiers.forget(list(node.subtree()), "stale")
        self.index.remove(node)
        return True

    def remove(self, slots: Iterable[int], cause: EvictionCause) -> int:
        """Evict snapshots that nobody restores from; returns how many bytes came free."""
        before = self._free_bytes
        for slot in slots:
            self.retire(self.known(slot), cause)
        return self._free_bytes - before

    def retire(self, snapshot: Snapshot, cause: LeavingCause) -> None:
        """Take it out of the index, and out of its slot once nobody restores from it."""
        self.index.detach(snapshot.node, _ABSENT.get(cause, "evicted"))
        snapshot.leaving = cause
        if self.slots[snapshot.slot].state is SlotState.READY:
            self.free(snapshot)

    def free(self, snapshot: Snapshot) -> None:
        """Give back what a snapshot holds that the index no longer names."""
        assert snapshot.leaving
        self.slots.begin_evict(snapshot.slot)
        for block in snapshot.blocks:
            self.held[block] -= 1
            if not self.held[block]:
                self.held_count -= 1
        self.pool.release(snapshot.blocks)
        if self.states is not None and snapshot.state is not None:
            self.states.release([snapshot.state])
        self.slots.finish_evict(snapshot.slot)
        if snapshot.leaving == "replaced":
            return
        self.evictions[snapshot.leaving] += 1
        node = snapshot.node
        tiers = self.tiers.where(node) if self.tiers is not None and self.tiers.can_restore(node) else []
        self.events.add(
            "evict",
            snapshot.leaving,
            slot=snapshot.slot,
            digest=node.digest,
            tokens=snapshot.tokens,
            tier=tiers[0] if tiers else "",
        )

    @property
    def _free_bytes(self) -> int:
        states = self.states.free_count * self.state_bytes if self.states else 0
        return self.pool.free_count * self.block_bytes + states
