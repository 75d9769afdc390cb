"""Clearing: snapshots go because room is short, the operator says so, or they are not to be trusted."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from protocol.control import Removed
from worker.eviction import Candidate, choose_for_blocks, choose_for_slot, was_passed
from worker.retention import Retention
from worker.returns import standing
from worker.slots import EvictionCause, Reservation, Snapshot
from worker.snapshot_index import Node
from worker.snapshots import SnapshotStore, UnknownSlot


class Clearing:
    """Chooses what goes, and lets it go. What is pinned or in use stays, but where the text says otherwise."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._retention = Retention(store)

    def make_room(self, blocks_needed: int, protect: Collection[int] = frozenset()) -> bool:
        """Evict until `blocks_needed` blocks are free. False, and nothing evicted, where that cannot be had."""
        store = self._store
        short = blocks_needed - store.pool.free_count
        if short <= 0:
            return True
        if short > store.held_count:
            return False
        held = self._retention.held()
        victims = self._victims({*protect, *held}, short)
        if victims is None and held:  # hints go no further than this
            victims = self._victims(protect, short)
        if victims is None:
            return False
        *whole, last = victims
        store.remove(whole, "blocks")
        if not self._shorten(store.known(last), blocks_needed - store.pool.free_count):
            store.remove([last], "blocks")
        store.index.trim()
        return True

    def _victims(self, protect: Collection[int], short: int) -> list[int] | None:
        store = self._store
        return choose_for_blocks(
            self._candidates(protect),
            short,
            store.pool.refcounts,
            divisible=store.divisible,
        )

    def _shorten(self, snapshot: Snapshot, blocks_short: int) -> bool:
        """Where states are divisible, let only the end of a snapshot go.

        False, and nothing done, where nothing would be left that no other has.
        """
        store = self._store
        if not store.divisible or snapshot.node.snapshots_below:
            return False
        kept = len(snapshot.blocks)
        while kept and blocks_short > 0:
            kept -= 1
            blocks_short -= store.pool.refcount(snapshot.blocks[kept]) == 1
        tokens = min(kept * store.pool.block_tokens, snapshot.tokens)
        node = snapshot.node
        for above in snapshot.node.ancestors():
            if above.slot is not None and store.pool.blocks_for(above.end) >= kept:
                return False
            if above.slot is not None or above.end < tokens:
                break
            node = above
        extended = node.snapshots_below - (node is not snapshot.node)  # by others than the one that goes
        if not kept or (tokens < node.end and extended):  # who extends it holds these tokens too, in other blocks
            return False
        store.shorten(snapshot, node, tokens)
        return True

    def give_up(self, block: int) -> bool:
        """Evict the snapshots that share a block with its one other holder, which then need not copy it.

        False, and nothing evicted, where one of them must stay or there are more holders.
        """
        store = self._store
        held = store.held[block]
        sharing = [s for s in store.slots.snapshots() if block in s.blocks]
        if not held or store.pool.refcount(block) != held + 1 or any(store.stays(s) for s in sharing):
            return False
        store.remove([snapshot.slot for snapshot in sharing], "blocks")
        store.index.trim()
        return True

    def slot_for(self, reservation: Reservation) -> int | None:
        """Evict for a reservation whose write begins. None, and counted, where nothing can go or should."""
        store = self._store
        candidates = self._candidates(reservation.protect | self._retention.held(), reservation)
        candidates = [c for c in candidates if not c.fixed]
        # What the newcomer extends may go for it where nothing else was passed: the commit cannot fail any more then,
        # and all blocks are held by it too. An answer that nobody has asked for leaves that alone.
        if reservation.absorbed or any(was_passed(c) and c.slot != reservation.source for c in candidates):
            candidates = [c for c in candidates if c.slot != reservation.source]
        victim = self._victim(reservation, candidates)
        if victim is None:
            store.aborts["not_worth" if candidates else "no_slot"] += 1
            return None
        store.remove([victim], "slots")
        return store.slots.reserve()

    def state_for(self, reservation: Reservation) -> int | None:
        """An entry of recurrent state for a reservation whose write begins, like `slot_for`."""
        store, states = self._store, self._store.states
        assert states is not None
        if not states.free_count:
            candidates = self._with_states(reservation.protect | self._retention.held())
            victim = self._victim(reservation, candidates)
            if victim is None:
                store.aborts["not_worth" if candidates else "no_state"] += 1
                return None
            store.remove([victim], "states")
        return states.allocate(1)[0]

    def make_state_room(self, needed: int, protect: Collection[int] = frozenset()) -> bool:
        """Evict until `needed` recurrent states are free. False, and nothing evicted, where that cannot be had."""
        store, states = self._store, self._store.states
        assert states is not None
        if needed - states.free_count > len(self._with_states(protect)):
            return False
        while states.free_count < needed:
            held = self._retention.held()
            going = self._with_states({*protect, *held}) or self._with_states(protect)
            victim = choose_for_slot(going)
            assert victim is not None
            store.remove([victim], "states")
        store.index.trim()
        return True

    def _with_states(self, protect: Collection[int]) -> list[Candidate]:
        """What may go, and frees an entry of recurrent state at once: nobody is about to copy it."""
        states = self._store.states
        assert states is not None
        busy = {s.slot for s in self._store.slots.snapshots() if s.state is None or states.refcount(s.state) > 1}
        return [c for c in self._candidates(protect) if not c.fixed and c.slot not in busy]

    def _victim(self, reservation: Reservation, candidates: Collection[Candidate]) -> int | None:
        return choose_for_slot(
            candidates,
            reservation.newcomer,
            share=reservation.share,
            extends=reservation.extends,
            unproven=reservation.absorbed,
        )

    def distrust(self, tenant: str, token_ids: array[int], depth: int) -> None:
        """A hit `depth` tokens deep was proved wrong, or led to a fault: all goes that holds these tokens, whether it
        is what the hit was restored from or shares memory with that.
        """
        store = self._store
        wrong = store.index.beginning_with(tenant, token_ids.tobytes(), depth)
        for node in wrong:
            if node.slot is not None:
                store.drop_stale(node, "verify")
        if store.tiers is not None:
            store.tiers.forget(wrong, "stale")
        store.index.trim()

    def drop_all(self, cause: EvictionCause) -> None:
        """Everything goes, pinned too; what is being restored from is no longer found and goes when released."""
        store = self._store
        for snapshot in store.slots.snapshots():
            if not snapshot.leaving:
                store.retire(snapshot, cause)
        store.index.trim()

    def evict(
        self,
        slots: Iterable[int],
        dry_run: bool = False,
        generations: Mapping[int, int] | None = None,
        alone: Collection[Node] = (),
    ) -> Removed:
        """Remove these snapshots, but not busy or pinned ones. Raises `UnknownSlot` before anything goes.

        `generations`, by slot, are those that the snapshots were chosen at: slots that hold others by now, or none,
        are passed over. `alone` are boundaries that only slower tiers have; those that stay are to be left out.
        """
        table, asked = self._store.slots, dict.fromkeys(slots)
        if generations is not None:
            held = {snapshot.slot for snapshot in table.snapshots()}
            asked = {slot: None for slot in asked if slot in held and table[slot].generation == generations[slot]}
        return self._clear([self._store.known(slot) for slot in asked], "operator", dry_run, alone)

    def flush(self, dry_run: bool = False) -> Removed:
        """Remove all but pinned snapshots; busy ones are no longer found and go when released."""
        store = self._store
        chosen = [snapshot for snapshot in store.slots.snapshots() if not snapshot.leaving]
        kept, alone = set(store.index.pinned), set() if store.tiers is None else store.tiers.alone()
        removed = self._clear(chosen, "flush", dry_run)
        if not dry_run:
            for slot in removed.busy:
                snapshot = store.known(slot)
                if not snapshot.pinned:
                    store.retire(snapshot, "flush")
        if store.tiers is None:
            return removed
        tier_bytes = store.tiers.flush(kept, dry_run=dry_run)
        return replace(removed, tier_bytes=tier_bytes, tier_snapshots=len(alone - kept))

    def pin(self, slot: int) -> None:
        """Keep this snapshot whatever is short, until `unpin`. Raises `UnknownSlot`, also for one that is going."""
        snapshot = self._store.known(slot)
        if snapshot.leaving:
            raise UnknownSlot(slot)
        self._store.index.pin(snapshot.node, pinned=True)

    def unpin(self, slot: int) -> None:
        """Raises `UnknownSlot`."""
        self._store.index.pin(self._store.known(slot).node, pinned=False)

    def _clear(
        self, chosen: Sequence[Snapshot], cause: EvictionCause, dry_run: bool, alone: Collection[Node] = ()
    ) -> Removed:
        store = self._store
        going = [snapshot for snapshot in chosen if not store.stays(snapshot)]
        busy = [snapshot.slot for snapshot in chosen if store.stays(snapshot)]
        slots = [snapshot.slot for snapshot in going]
        if dry_run:
            counts: dict[int, int] = {}
            for snapshot in going:
                for block in snapshot.blocks:
                    counts[block] = counts.get(block, 0) + 1
            blocks = sum(1 for block, count in counts.items() if count == store.pool.refcount(block))
            freed = blocks * store.block_bytes + len(going) * store.state_bytes
        else:
            freed = store.remove(slots, cause)
        tier_bytes = 0
        if cause == "operator" and store.tiers is not None:
            nodes = [*alone, *(snapshot.node for snapshot in going)]
            tier_bytes = store.tiers.evict(nodes, dry_run=dry_run)
        store.index.trim()
        return Removed(slots, busy, freed, dry_run, tier_bytes, len(alone))

    def _candidates(self, protect: Collection[int], newcomer: Reservation | None = None) -> list[Candidate]:
        """All snapshots, weighed as they would be worth beside `newcomer`."""
        store = self._store
        now = store.clock()
        source, joining = (newcomer.source, newcomer.node) if newcomer else (None, None)
        unproven_below = Counter(
            above for s in store.slots.snapshots() if s.unproven and not s.leaving for above in s.node.ancestors()
        )
        named = self._retention.kept().named
        candidates = []
        for snapshot in store.slots.snapshots():
            if snapshot.leaving:
                continue
            node = snapshot.node
            above = next((n for n in node.ancestors() if n.slot is not None or n is joining), None)
            goes_on = snapshot.slot == source
            interior = goes_on or node.snapshots_below > unproven_below[node]
            is_now = standing(node, goes_on=goes_on)
            share = store.returns.share(is_now, node.added)
            if snapshot.slot in named:
                # It will come back, says its client, who is believed within bounds.
                share = max(share, store.returns.share("going_on"))
            has_gone_on = interior or node.inner or bool(node.children)
            # Whoever asks for what was built on it, and is gone, starts from here.
            end = node.last_begun if node.children and not (goes_on or node.snapshots_below) else None
            candidates.append(
                Candidate(
                    slot=snapshot.slot,
                    parent=above.slot if above else None,
                    start=above.end if above else 0,
                    end=snapshot.tokens,
                    interior=interior,
                    passed=goes_on or is_now == "passed",
                    share=share,
                    unproven=snapshot.unproven,
                    idle_seconds=now - (node.returned_at if has_gone_on else node.used_at),
                    last_used=node.last_used,
                    blocks=snapshot.blocks,
                    pause=store.returns.pause_of(node),
                    fixed=snapshot.slot in protect or store.stays(snapshot),
                    end_share=store.returns.share(standing(end), end.added) if end else 0.0,
                    end_idle_seconds=now - end.used_at if end else 0.0,
                )
            )
        return candidates
