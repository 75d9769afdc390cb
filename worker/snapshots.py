"""The snapshot store: slot table, index and references to KV blocks, kept consistent with one another.

Called from the engine loop only; every call leaves the store consistent, also one that raises. A snapshot holds
references to the blocks of its tokens and nothing is ever copied here: whoever continues from a block with other
holders copies it before writing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from protocol.control import Removed, SlotInfo, TreeNode
from protocol.messages import Boundary
from worker.block_pool import BlockPool
from worker.eviction import PAUSE_SECONDS, Candidate, choose_for_blocks, choose_for_slot, recompute_cost
from worker.invariants import check_invariants
from worker.lookup import Lookup, explain
from worker.placement import worth_keeping
from worker.slots import EvictionCause, SlotState, SlotTable, Snapshot
from worker.snapshot_index import AbsentReason, Node, SnapshotIndex
from worker.snapshot_view import slot_infos, snapshot_tree

GHOST_BYTES = 64 << 20
SHORTEST_PAUSE = 1.0  # seconds: what comes back sooner came together
PAUSE_STEP = 1 / 16  # how much of a pause just seen goes, by its logarithm, into the typical one

AbortCause = Literal["length", "duplicate", "collision", "no_slot", "not_worth", "cancelled", "failed"]
StaleCause = Literal["tokens", "generation", "length", "fingerprint", "checksum", "verify"]
_ABSENT: dict[EvictionCause, AbsentReason] = {"flush": "flushed", "stale": "stale"}


class UnknownSlot(KeyError):
    """No snapshot in that slot."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.slot = slot

    def __str__(self) -> str:
        return f"slot {self.slot} holds no snapshot"


class Restored(NamedTuple):
    """References taken for a sequence: the blocks of its first `tokens` tokens, the last one perhaps half full."""

    blocks: list[int]
    tokens: int


@dataclass(slots=True, eq=False)
class Reservation:
    """The right to one slot: a free one, or None while one must be emptied for it when the write begins.

    `newcomer` is what its tokens cost to compute from the one that it `extends`, once known; `written` is set from
    `begin_write` on.
    """

    slot: int | None
    protect: frozenset[int]
    newcomer: float | None = None
    extends: bool = False
    written: bool = False


class SnapshotStore:
    """See the module. `slots` 0 disables it: every lookup is a miss, nothing is kept.

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
    ) -> None:
        """`divisible`: the state at a boundary is a part of the state at a later one, as where all layers attend."""
        self.slots = SlotTable(slots)
        self.pool = pool
        self.block_bytes = block_bytes
        self.index = SnapshotIndex(ghost_bytes)
        self.commits = 0
        self.aborts: dict[str, int] = dict.fromkeys(get_args(AbortCause), 0)
        self.evictions: dict[str, int] = dict.fromkeys(get_args(EvictionCause), 0)
        self.stale_drops: dict[str, int] = dict.fromkeys(get_args(StaleCause), 0)
        self.reservations: set[Reservation] = set()
        self.held = [0] * (pool.total_count + 1)  # snapshots that refer to a block
        self.held_count = 0  # blocks that any snapshot refers to
        self._clock = clock
        self._divisible = divisible
        self._pause = PAUSE_SECONDS  # a typical one between two requests of a conversation, as seen so far

    # Finding

    def lookup(
        self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], *, peek: bool = False
    ) -> Lookup:
        """The deepest snapshot on the request's verified chain, and why it is not deeper.

        Marks the chain as used and drops entries that prove stale, unless it only peeks. Where states are divisible,
        a boundary that a deeper snapshot passes gets one of its own first.
        """
        if not len(self.slots):
            return Lookup(None, 0, 0, "miss", "disabled", 0, None, None)
        data = token_ids.tobytes()
        chain, clash = self.index.walk(tenant, data, boundaries)
        refused = 0
        if clash is not None:
            refused = boundaries[len(chain)].end
            if not peek:
                self._drop_clash(clash)
        found = None
        for node in reversed(chain):
            if node.end >= len(token_ids):
                continue
            if node.slot is None and (peek or not self._divide(node)):
                continue
            fault = self._fault(node)
            if fault is None:
                found = node
                break
            refused = max(refused, node.end)
            if not peek:
                self._drop_stale(node, fault)
        result = explain(
            boundaries, len(token_ids), chain, found, refused, self.index.common_prefix(tenant, data, chain)
        )
        if not peek:
            if chain:
                self.index.touch(chain[-1], self._clock())
            self.index.trim()
        return result

    def note(self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], computed_to: int) -> None:
        """Remember the boundaries up to `computed_to` as computed, so that later requests may branch there."""
        if not len(self.slots):
            return
        data = token_ids.tobytes()
        done = [boundary for boundary in boundaries if boundary.end <= computed_to]
        chain, clash = self.index.walk(tenant, data, done)
        if clash is None:
            self.index.extend(tenant, data, done, chain, self._clock())
            self.index.trim()

    def wanted(
        self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], depth: int
    ) -> list[Boundary]:
        """The boundaries deeper than `depth` that are worth a snapshot. Ask before the request is noted."""
        if not len(self.slots):
            return []
        chain = self.index.walk(tenant, token_ids.tobytes(), boundaries).chain
        return worth_keeping(boundaries, len(token_ids), depth, chain)

    # Restoring

    def begin_restore(self, slot: int, generation: int, *, asked: bool = True) -> Restored | None:
        """Take references for a sequence and pin the slot until `end_restore`.

        `asked` counts it as a hit; work of our own is none.

        None, and nothing taken, where the slot no longer holds what was looked up: start from cleared state.
        """
        snapshot = self._snapshot_in(slot)
        if snapshot is None or snapshot.leaving or self.slots[slot].generation != generation:
            return None
        if snapshot.node.slot != slot:
            self.stale_drops["generation"] += 1
            return None
        fault = self._fault(snapshot.node)
        if fault is not None:
            self._drop_stale(snapshot.node, fault)
            return None
        self.slots.acquire(slot)
        self.pool.share(snapshot.blocks)
        if asked:
            snapshot.node.hits += 1
            now = self._clock()
            gap = max(now - snapshot.node.asked_at, SHORTEST_PAUSE)
            self._pause *= (gap / self._pause) ** PAUSE_STEP
            snapshot.node.asked_at = now
            self.index.touch(snapshot.node, now)
        return Restored(list(snapshot.blocks), snapshot.tokens)

    def end_restore(self, slot: int) -> None:
        """The sequence has what it needs. Its references stay its own."""
        self.slots.release(slot)
        snapshot = self._snapshot_in(slot)
        assert snapshot is not None
        if snapshot.leaving and self.slots[slot].state is SlotState.READY:
            self._free(snapshot)
            self.index.trim()

    # Keeping

    def reserve(self, protect: Collection[int] = frozenset()) -> Reservation | None:
        """The right to a slot; None, counted as an abort, where all are in use, pinned, protected or reserved.

        Changes nothing but the free list: what must go stays until the write begins, and may be hit meanwhile.
        `protect` are slots that must not go.
        """
        slot = self.slots.reserve()
        if slot is None:
            promised = sum(1 for other in self.reservations if other.slot is None)
            can_go = sum(1 for s in self.slots.snapshots() if s.slot not in protect and not self._stays(s))
            if can_go <= promised:
                self.aborts["no_slot"] += 1
                return None
        reservation = Reservation(slot, frozenset(protect))
        self.reservations.add(reservation)
        return reservation

    def begin_write(self, reservation: Reservation) -> int | None:
        """The slot to write to, its former snapshot gone and its generation new. None: aborted, nothing to have.

        For state that is copied into the slot before `commit`, which otherwise does this itself.
        """
        self._require_open(reservation)
        if reservation.written:
            return reservation.slot
        if reservation.slot is None:
            reservation.slot = self.slots.reserve()
        if reservation.slot is None:
            reservation.slot = self._empty_slot(reservation)
        if reservation.slot is None:
            self.reservations.remove(reservation)
            return None
        self.slots.begin_write(reservation.slot)
        reservation.written = True
        return reservation.slot

    def commit(
        self,
        reservation: Reservation,
        tenant: str,
        token_ids: array[int],
        boundary: Boundary,
        boundaries: Sequence[Boundary],
        blocks: Sequence[int],
        *,
        stored_tokens: int,
    ) -> int | None:
        """Publish a snapshot of token_ids[:boundary.end], whose KV is in `blocks`; returns its slot.

        The store takes references of its own. None where it is refused, and counted as an abort: `stored_tokens`
        (what the layers hold) or `blocks` do not match the key, the snapshot exists, or no slot is to be had.
        `boundaries` are those of the request, rising, `boundary` among them, or `ValueError` is raised.
        """
        self._require_open(reservation)
        path = [known for known in boundaries if known.end <= boundary.end]
        if not path or path[-1] != boundary:
            raise ValueError("the boundary is not one of the request's")
        if any(before.end >= after.end for before, after in pairwise(path)):
            raise ValueError("the boundaries do not rise")
        exact = boundary.end == stored_tokens <= len(token_ids)
        if not exact or len(blocks) != self.pool.blocks_for(stored_tokens):
            self.abort(reservation, "length")
            return None
        data = token_ids[: boundary.end].tobytes()
        chain, clash = self.index.walk(tenant, data, path)
        if clash is not None and not self._drop_clash(clash):
            self.abort(reservation, "collision")
            return None
        if len(chain) == len(path) and chain[-1].slot is not None:
            fault = self._fault(chain[-1])
            if fault is None:
                self.abort(reservation, "duplicate")
                return None
            self._drop_stale(chain[-1], fault)
        start = max((node.end for node in chain if node.slot is not None), default=0)
        reservation.newcomer, reservation.extends = recompute_cost(start, boundary.end), start > 0
        kept = tuple(blocks)
        self.pool.share(kept)
        slot = self.begin_write(reservation)
        if slot is None:
            self.pool.release(kept)
            return None
        node = self.index.extend(tenant, data, path, chain, self._clock())
        assert node is not None
        self._publish(reservation, node, slot, kept)
        self.index.trim()
        return slot

    def abort(self, reservation: Reservation, cause: AbortCause) -> None:
        """Give the slot back. If nothing was written, nothing else has changed."""
        self._require_open(reservation)
        self.reservations.remove(reservation)
        self.aborts[cause] += 1
        slot = reservation.slot
        if slot is None:
            return
        if reservation.written:
            self.slots.begin_evict(slot)
            self.slots.finish_evict(slot)
        else:
            self.slots.give_back(slot)

    # Making room

    def make_room(self, blocks_needed: int, protect: Collection[int] = frozenset()) -> bool:
        """Evict until `blocks_needed` blocks are free. False, and nothing evicted, where that cannot be had."""
        short = blocks_needed - self.pool.free_count
        if short <= 0:
            return True
        if short > self.held_count:
            return False
        victims = choose_for_blocks(self._candidates(protect), short, self.pool.refcounts, pause=self._pause)
        if victims is None:
            return False
        self._remove(victims, "blocks")
        self.index.trim()
        return True

    def give_up(self, block: int) -> bool:
        """Evict the snapshots that share a block with its one other holder, which then need not copy it.

        False, and nothing evicted, where one of them must stay or there are more holders.
        """
        held = self.held[block]
        sharing = [s for s in self.slots.snapshots() if block in s.blocks]
        if not held or self.pool.refcount(block) != held + 1 or any(self._stays(s) for s in sharing):
            return False
        self._remove([snapshot.slot for snapshot in sharing], "blocks")
        self.index.trim()
        return True

    def distrust(self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary]) -> None:
        """A hit at the last of `boundaries` was proved wrong: its snapshot goes, and all that was built on it."""
        chain, _ = self.index.walk(tenant, token_ids.tobytes(), boundaries)
        if len(chain) < len(boundaries):
            return
        for node in [node for node in chain[-1].subtree() if node.slot is not None]:
            self._drop_stale(node, "verify")
        self.index.trim()

    def drop_all(self, cause: EvictionCause) -> None:
        """Everything goes, pinned too; what is being restored from is no longer found and goes when released."""
        for snapshot in self.slots.snapshots():
            if not snapshot.leaving:
                self._retire(snapshot, cause)
        self.index.trim()

    # The operator's verbs (control.py). Reading touches nothing.

    def evict(self, slots: Iterable[int], dry_run: bool = False) -> Removed:
        """Remove these snapshots, but not busy or pinned ones. Raises `UnknownSlot` before anything goes."""
        chosen = [self._known(slot) for slot in dict.fromkeys(slots)]
        return self._clear(chosen, "operator", dry_run)

    def flush(self, dry_run: bool = False) -> Removed:
        """Remove all but pinned snapshots; busy ones are no longer found and go when released."""
        chosen = [snapshot for snapshot in self.slots.snapshots() if not snapshot.leaving]
        removed = self._clear(chosen, "flush", dry_run)
        if not dry_run:
            for slot in removed.busy:
                snapshot = self._known(slot)
                if not snapshot.pinned:
                    self._retire(snapshot, "flush")
        return removed

    def pin(self, slot: int) -> None:
        """Keep this snapshot whatever is short, until `unpin`. Raises `UnknownSlot`."""
        self._known(slot).pinned = True

    def unpin(self, slot: int) -> None:
        """Raises `UnknownSlot`."""
        self._known(slot).pinned = False

    def slot_info(self, slot: int) -> SlotInfo:
        """Raises `UnknownSlot` for a slot that is free or does not exist."""
        if not 0 <= slot < len(self.slots) or self.slots[slot].state is SlotState.FREE:
            raise UnknownSlot(slot)
        return slot_infos(self.slots, self.pool, self.block_bytes, [slot], self._clock())[0]

    def list_slots(self, cursor: int = 0, limit: int = 100) -> tuple[list[SlotInfo], int | None, int]:
        """Up to `limit` slots in use from slot `cursor` on, the next page's cursor, and how many are in use."""
        used = [slot for slot in range(len(self.slots)) if self.slots[slot].state is not SlotState.FREE]
        rest = [slot for slot in used if slot >= cursor]
        page, after = rest[: max(limit, 1)], rest[max(limit, 1) :]
        infos = slot_infos(self.slots, self.pool, self.block_bytes, page, self._clock())
        return infos, after[0] if after else None, len(used)

    def tree(self) -> list[TreeNode]:
        """All snapshots, each after the nearest shallower one of its conversation."""
        return snapshot_tree(self.slots)

    def slot_states(self) -> dict[str, int]:
        """Slots by state, every state present."""
        return self.slots.counts()

    @property
    def snapshot_count(self) -> int:
        return len(self.slots.snapshots())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the distinct blocks that snapshots hold."""
        return self.held_count * self.block_bytes

    def check_invariants(self, sequences: Iterable[Collection[int]] | None = None) -> None:
        """Raises `InvariantViolation`. `sequences`: the blocks of every other holder; None leaves them out."""
        check_invariants(self.slots, self.index, self.pool, self.held, self.held_count, self.reserved(), sequences)

    def reserved(self) -> list[int]:
        """The slots that open reservations have."""
        return [r.slot for r in self.reservations if r.slot is not None]

    # Inside

    def _snapshot_in(self, slot: int) -> Snapshot | None:
        return self.slots[slot].snapshot if 0 <= slot < len(self.slots) else None

    def _known(self, slot: int) -> Snapshot:
        snapshot = self._snapshot_in(slot)
        if snapshot is None:
            raise UnknownSlot(slot)
        return snapshot

    def _require_open(self, reservation: Reservation) -> None:
        if reservation not in self.reservations:
            raise ValueError("this reservation was committed or aborted before")

    def _fault(self, node: Node) -> StaleCause | None:
        """What is wrong with the entry of a node that has a slot."""
        assert node.slot is not None
        row = self.slots[node.slot]
        snapshot = row.snapshot
        if snapshot is None or snapshot.node is not node or row.generation != node.generation:
            return "generation"
        if snapshot.tokens != node.end or len(snapshot.blocks) != self.pool.blocks_for(node.end):
            return "length"
        return None

    def _publish(self, reservation: Reservation, node: Node, slot: int, blocks: tuple[int, ...]) -> None:
        """Hand references that were taken over to a new snapshot in a slot that was begun."""
        for block in blocks:
            if not self.held[block]:
                self.held_count += 1
            self.held[block] += 1
        returned = any(above.hits and above.kind != "head" for above in node.ancestors())
        self.slots.publish(Snapshot(slot, node, blocks, node.end, returned, self._clock()))
        self.index.attach(node, slot, self.slots[slot].generation)
        self.reservations.remove(reservation)
        self.commits += 1

    def _divide(self, node: Node) -> bool:
        """Keep a known boundary by sharing the first blocks of a deeper snapshot, if there is one, and a slot."""
        if not self._divisible or not node.snapshots_below:
            return False
        deeper = next(below for below in node.subtree() if below.slot is not None)
        if self._fault(deeper) is not None:
            return False
        assert deeper.slot is not None
        reservation = self.reserve({deeper.slot})
        if reservation is None:
            return False
        above = node.snapshot_above()
        start = above.end if above else 0
        reservation.newcomer, reservation.extends = recompute_cost(start, node.end), start > 0
        kept = self._known(deeper.slot).blocks[: self.pool.blocks_for(node.end)]
        self.pool.share(kept)
        slot = self.begin_write(reservation)
        if slot is None:
            self.pool.release(kept)
            return False
        self._publish(reservation, node, slot, kept)
        return True

    def _drop_stale(self, node: Node, cause: StaleCause) -> None:
        """The entry is never found again. Its slot is freed unless it belongs to another entry by now."""
        self.stale_drops[cause] += 1
        assert node.slot is not None
        snapshot = self.slots[node.slot].snapshot
        if snapshot is not None and snapshot.node is node:
            self._retire(snapshot, "stale")
        else:
            self.index.detach(node, "stale")

    def _drop_clash(self, node: Node) -> bool:
        """Forget an entry whose digest names other ids, and what extends it. False where any of it is in use."""
        self.stale_drops["tokens"] += 1
        snapshots = [self._known(below.slot) for below in node.subtree() if below.slot is not None]
        if any(self._stays(snapshot) for snapshot in snapshots):
            return False
        self._remove([snapshot.slot for snapshot in snapshots], "stale")
        self.index.remove(node)
        return True

    def _stays(self, snapshot: Snapshot) -> bool:
        return snapshot.pinned or self.slots[snapshot.slot].state is not SlotState.READY

    def _candidates(self, protect: Collection[int]) -> list[Candidate]:
        now = self._clock()
        candidates = []
        for snapshot in self.slots.snapshots():
            if snapshot.leaving:
                continue
            node = snapshot.node
            above = node.snapshot_above()
            candidates.append(
                Candidate(
                    slot=snapshot.slot,
                    parent=above.slot if above else None,
                    start=above.end if above else 0,
                    end=node.end,
                    interior=node.snapshots_below > 0,
                    anchor=node.kind == "head" or node.is_branch,
                    returned=snapshot.returned or node.hits > 0,
                    idle_seconds=now - (node.asked_at if node.snapshots_below else node.used_at),
                    last_used=node.last_used,
                    blocks=snapshot.blocks,
                    fixed=snapshot.slot in protect or self._stays(snapshot),
                )
            )
        return candidates

    def _empty_slot(self, reservation: Reservation) -> int | None:
        """Evict for a reservation whose write begins. None, and counted, where nothing can go or should."""
        candidates = [c for c in self._candidates(reservation.protect) if not c.fixed]
        victim = choose_for_slot(candidates, reservation.newcomer, extends=reservation.extends, pause=self._pause)
        if victim is None:
            self.aborts["not_worth" if candidates else "no_slot"] += 1
            return None
        self._remove([victim], "slots")
        return self.slots.reserve()

    def _clear(self, chosen: Sequence[Snapshot], cause: EvictionCause, dry_run: bool) -> Removed:
        going = [snapshot for snapshot in chosen if not self._stays(snapshot)]
        busy = [snapshot.slot for snapshot in chosen if self._stays(snapshot)]
        slots = [snapshot.slot for snapshot in going]
        if dry_run:
            counts: dict[int, int] = {}
            for snapshot in going:
                for block in snapshot.blocks:
                    counts[block] = counts.get(block, 0) + 1
            freed = sum(1 for block, count in counts.items() if count == self.pool.refcount(block))
        else:
            freed = self._remove(slots, cause)
            self.index.trim()
        return Removed(slots, busy, freed * self.block_bytes, dry_run)

    def _remove(self, slots: Iterable[int], cause: EvictionCause) -> int:
        """Evict snapshots that nobody restores from; returns how many blocks came free."""
        before = self.pool.free_count
        for slot in slots:
            self._retire(self._known(slot), cause)
        return self.pool.free_count - before

    def _retire(self, snapshot: Snapshot, cause: EvictionCause) -> None:
        """Take it out of the index, and out of its slot once nobody restores from it."""
        self.index.detach(snapshot.node, _ABSENT.get(cause, "evicted"))
        snapshot.leaving = cause
        if self.slots[snapshot.slot].state is SlotState.READY:
            self._free(snapshot)

    def _free(self, snapshot: Snapshot) -> None:
        """Give back what a snapshot holds that the index no longer names."""
        assert snapshot.leaving
        self.slots.begin_evict(snapshot.slot)
        for block in snapshot.blocks:
            self.held[block] -= 1
            if not self.held[block]:
                self.held_count -= 1
        self.pool.release(snapshot.blocks)
        self.slots.finish_evict(snapshot.slot)
        self.evictions[snapshot.leaving] += 1
