"""Any course of events on a store, against a model that knows only what was kept and what was computed.

The engine of the rig checks the state in memory; the model checks what lookups say.
"""

from __future__ import annotations

from operator import ge

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from snapshot_rig import Run, StartsAnywhere, spelled, weak
from store_model import BLOCKS, SLOTS, StoreModel

from worker.block_pool import OutOfBlocks
from worker.slots import Snapshot
from worker.snapshot_view import list_slots, snapshot_tree

message = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
messages = st.lists(message, min_size=1, max_size=4).map(tuple)


class StoreMachine(StoreModel):
    """Requests that share prefixes, in any interleaving, on a small pool and few slots."""

    # Requests

    @rule(history=messages, tenant=st.sampled_from(["", "other"]))
    def a_conversation_begins(self, history, tenant):
        self._whole(self._start(tenant, history, hold=False))

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), added=st.lists(message, max_size=2))
    def a_conversation_goes_on(self, data, added):
        tenant, history = data.draw(st.sampled_from(self.histories))
        self._whole(self._start(tenant, history + tuple(added), hold=False))

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), keep=st.integers(1, 3), added=st.lists(message, max_size=2))
    def a_conversation_branches_or_is_cut(self, data, keep, added):
        tenant, history = data.draw(st.sampled_from(self.histories))
        self._whole(self._start(tenant, history[:keep] + tuple(added), hold=False))

    @precondition(lambda self: self.histories and len(self.engine.running) < 3)
    @rule(data=st.data(), keep=st.integers(1, 6), added=st.lists(message, max_size=2), hold=st.booleans())
    def a_request_starts(self, data, keep, added, hold):
        tenant, history = data.draw(st.sampled_from(self.histories))
        self._start(tenant, history[:keep] + tuple(added), hold)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), tokens=st.integers(1, 12))
    def a_chunk_is_computed(self, data, tokens):
        self._compute(data.draw(st.sampled_from(self.engine.running)), tokens)

    def _whole(self, run: Run) -> None:
        self._compute(run, len(run.prompt))
        if run in self.engine.running:
            self.engine.finish(run)
            self._learn(run)

    def _compute(self, run: Run, tokens: int) -> None:
        before = set(run.committed)
        try:
            self.engine.compute(run, min(run.computed + tokens, len(run.prompt)))
        except OutOfBlocks:
            self.engine.finish(run)
        self._learn(run)
        self._learn_commits(run, set(run.committed) - before)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def a_request_ends_or_is_cancelled(self, data):
        run = data.draw(st.sampled_from(self.engine.running))
        self.engine.verify_run(run)
        kept = self.engine.kept()
        self.engine.finish(run)
        assert self.engine.kept() == kept, "what is materialised is kept, whatever becomes of its request"
        self._learn(run)

    @precondition(lambda self: any(run.restoring for run in self.engine.running))
    @rule(data=st.data())
    def a_restore_source_is_released(self, data):
        run = data.draw(st.sampled_from([run for run in self.engine.running if run.restoring]))
        self.engine.release_source(run)

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def a_lookup_waits(self, data):
        tenant, history = data.draw(st.sampled_from(self.histories))
        request = self._prompt(tenant, history)
        self.waiting = request, self.finding.lookup(tenant, request.ids, request.boundaries)
        self._learn_cuts()

    @precondition(lambda self: self.waiting is not None and self.waiting[1].slot is not None)
    @rule()
    def what_was_looked_up_is_restored_late(self):
        request, found = self.waiting
        # Without ids and length, which would tell by themselves: the generation must be enough.
        restored = self.finding.begin_restore(found.slot, found.generation, asked=False)
        if restored is not None:
            self.engine.verify(restored.blocks, request.ids[: found.depth], "what was looked up")
            self.finding.end_restore(found.slot)
            self.engine.pool.release(restored.blocks)

    # Reservations by hand

    @precondition(lambda self: not self.reservations)
    @rule(given_up=st.booleans())
    def reserve(self, given_up):
        states, free = self._states(), self.store.slots.free_slots
        reservation = self.keeping.reserve()
        assert self._states(but=reservation) == {s: v for s, v in states.items() if self._not_of(reservation, s)}
        if reservation is not None and given_up:
            self.keeping.abort(reservation, "failed")
            assert (self._states(), self.store.slots.free_slots) == (states, free), "it has moved something"
        elif reservation is not None:
            self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def begin_write(self, data):
        reservation = data.draw(st.sampled_from(self.reservations))
        if self.keeping.begin_write(reservation) is None:
            self.reservations.remove(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def abort(self, data):
        reservation = data.draw(st.sampled_from(self.reservations))
        self.reservations.remove(reservation)
        before = self._states(but=reservation)
        self.keeping.abort(reservation, "failed")
        assert self._states(but=reservation) == before

    @precondition(lambda self: self.reservations and any(run.computed for run in self.engine.running))
    @rule(data=st.data(), wrong=st.sampled_from([0, 0, 0, 1, -1]), absorbed=st.booleans())
    def commit(self, data, wrong, absorbed):
        run = data.draw(st.sampled_from([run for run in self.engine.running if run.computed]))
        ready = [b for b in run.prompt.boundaries if b.end <= run.computed]
        if not ready:
            return
        boundary = data.draw(st.sampled_from(ready))
        reservation = self.reservations.pop()
        slot = self.engine.commit(reservation, run, boundary, boundary.end + wrong, absorbed)
        if wrong:
            assert slot is None
        elif slot is not None:
            self._learn_commits(run, {boundary.end})

    # The operator, and trouble

    @rule(
        data=st.data(), what=st.sampled_from(["evict", "unpin", "room", "room", "time", "time", "flush", "memory"])
    )
    def something_from_outside(self, data, what):
        match what:
            case "evict":
                self._evict(data, data.draw(st.booleans()))
            case "unpin":
                self._unpin()
            case "room":
                self._make_room(data, data.draw(st.integers(0, BLOCKS + 1)))
            case "time":
                self.engine.clock.now += data.draw(st.sampled_from([1, 100, 10_000]))
            case "flush":
                self._flush(data.draw(st.booleans()))
            case "memory":
                self.clearing.drop_all("oom")
                self.pinned = []
                assert self.engine.kept() == []

    def _flush(self, dry_run: bool) -> None:
        before = self._states()
        free = self.engine.pool.free_count
        removed = self.clearing.flush(dry_run)
        if dry_run:
            assert self._states() == before
            removed = self.clearing.flush()
        assert removed.freed_bytes == (self.engine.pool.free_count - free) * self.store.block_bytes
        assert {s.slot for s in self.store.slots.snapshots() if not s.leaving} <= set(removed.busy)

    def _evict(self, data: st.DataObject, dry_run: bool) -> None:
        held = [s.slot for s in self.store.slots.snapshots()]
        if held:
            chosen = data.draw(st.lists(st.sampled_from(held), min_size=1))
            planned = self.clearing.evict(chosen, dry_run=True)
            if not dry_run:
                free = self.engine.pool.free_count
                done = self.clearing.evict(chosen)
                assert (done.removed, done.busy, done.freed_bytes) == (
                    planned.removed,
                    planned.busy,
                    planned.freed_bytes,
                )
                assert done.freed_bytes == (self.engine.pool.free_count - free) * self.store.block_bytes

    @precondition(lambda self: self.engine.kept() and not self.pinned)
    @rule(data=st.data())
    def a_snapshot_is_pinned(self, data):
        snapshot = data.draw(st.sampled_from([s for s in self.store.slots.snapshots() if not s.leaving]))
        self.clearing.pin(snapshot.slot)
        self.pinned.append(snapshot)

    def _unpin(self) -> None:
        for snapshot in self.pinned:
            self.clearing.unpin(snapshot.slot)
        self.pinned = []

    def _make_room(self, data: st.DataObject, blocks: int) -> None:
        held = [s.slot for s in self.store.slots.snapshots()]
        protect = frozenset(data.draw(st.sets(st.sampled_from(held))) if held else ())
        kept = {s.slot for s in self.store.slots.snapshots() if s.pinned or s.slot in protect}
        before = self._states()
        if self.clearing.make_room(blocks, protect):
            assert self.engine.pool.free_count >= blocks
        else:
            assert self._states() == before
            assert self._most_free(kept) < blocks
        assert kept <= {s.slot for s in self.store.slots.snapshots()}

    # What must hold after every step

    @invariant()
    def state_is_consistent(self):
        self.engine.check()
        for run in self.engine.running:
            self.engine.verify_run(run)

    @invariant()
    def generations_only_rise(self):
        generations = [self.store.slots[slot].generation for slot in range(SLOTS)]
        assert all(map(ge, generations, self.generations)), "a slot's write looks like an earlier one"
        self.generations = generations

    @invariant()
    def what_is_pinned_stays(self):
        self.pinned = [self._still_pinned(snapshot) for snapshot in self.pinned]

    def _still_pinned(self, snapshot: Snapshot) -> Snapshot:
        """The same, or where it was a part what has taken its place."""
        if self.store.slots[snapshot.slot].snapshot is snapshot:
            return snapshot
        assert snapshot.tokens < snapshot.node.end
        (whole,) = (s for s in self.store.slots.snapshots() if s.pinned and not s.leaving)
        assert spelled(whole.node)[: snapshot.tokens] == spelled(snapshot.node)[: snapshot.tokens]
        assert whole.tokens > snapshot.tokens
        return whole

    @invariant()
    def reading_disturbs_nothing(self):
        before = self._recency()
        slots, following, total = list_slots(self.store, 0, SLOTS)
        assert following is None
        assert total == len(slots) == SLOTS - self.store.slot_states()["free"]
        assert sum(1 for info in slots if info.tokens) == self.store.snapshot_count
        assert self.store.snapshot_bytes <= self.engine.pool.used_count * self.store.block_bytes
        assert sorted(node.tokens for node in snapshot_tree(self.store)) == self.engine.kept()
        for tenant, history in self.histories[-3:]:
            request = self._prompt(tenant, history)
            self.finding.lookup(tenant, request.ids, request.boundaries, peek=True)
        assert self._recency() == before

    def teardown(self):
        for run in list(self.engine.running):
            self.engine.finish(run)
        for reservation in self.reservations:
            self.keeping.abort(reservation, "cancelled")
        self.engine.check()
        for slot in [s.slot for s in self.store.slots.snapshots()]:
            self.clearing.unpin(slot)
        self.clearing.flush()
        # Nobody holds anything: all memory and all slots are back.
        assert self.engine.pool.free_count == BLOCKS
        assert self.store.slot_states()["free"] == SLOTS
        assert self.store.snapshot_bytes == 0


class WeakDigestMachine(StoreMachine):
    """The same with digests of two bits: whatever is restored must be right all the same."""

    shape = staticmethod(weak)


class DivisibleMachine(StartsAnywhere, StoreMachine):
    """The same where a snapshot can be cut anywhere, and every token that two messages share is worth it."""


class CrowdedMachine(StoreMachine):
    """The same where every slot is taken from the start, and a request has come as far as its first boundary."""

    @initialize()
    def begin(self):
        for history in (((1, 1), (2,)), ((2, 2), (1,)), ((3,), (3, 3))):
            self._whole(self._start("", history, hold=False))
        self._compute(self._start("", ((1, 2, 3), (2, 2, 2)), hold=False), 4)


COURSE = settings(max_examples=150, stateful_step_count=40, deadline=None)
