"""The store under any course of events, against a model that knows only what was kept and what was computed.

The engine of the rig checks the state in memory; the model checks what lookups say. The last tests put faults of the
kind seen in other servers into the store and see that the machine finds each.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from snapshot_rig import Engine, Prompt, Run, prompt, strong, weak

import worker.snapshots
from worker.block_pool import BlockError, BlockPool, OutOfBlocks
from worker.invariants import InvariantViolation
from worker.slots import IllegalTransition, Reservation, SlotState, SlotTable, Snapshot
from worker.snapshot_clearing import Clearing
from worker.snapshot_finding import Finding
from worker.snapshot_index import SnapshotIndex, Walk
from worker.snapshot_keeping import Keeping
from worker.snapshot_view import list_slots, snapshot_tree
from worker.snapshots import SnapshotStore

SLOTS = 3
BLOCKS = 14

message = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
messages = st.lists(message, min_size=1, max_size=4).map(tuple)


class StoreMachine(RuleBasedStateMachine):
    """Requests that share prefixes, in any interleaving, on a small pool and few slots."""

    shape = staticmethod(strong)
    divisible = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(SLOTS, BLOCKS, divisible=self.divisible)
        self.store = self.engine.store
        self.finding, self.keeping, self.clearing = self.engine.finding, self.engine.keeping, self.engine.clearing
        self.reservations: list[Reservation] = []
        self.histories: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        # What the model knows: the key of each slot's snapshot by slot and generation, and all keys ever computed.
        self.published: dict[tuple[int, int], tuple[str, tuple[tuple[int, ...], ...]]] = {}
        self.pinned: list[Snapshot] = []
        self.computed: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

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

    # Reservations by hand

    @precondition(lambda self: not self.reservations)
    @rule()
    def reserve(self):
        states = self._states()
        reservation = self.keeping.reserve()
        if reservation is not None:
            self.reservations.append(reservation)
        assert self._states(but=reservation) == {s: v for s, v in states.items() if self._not_of(reservation, s)}

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
        assert set(self.engine.slots_at(*self.engine.kept())) <= set(removed.busy)

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
    def what_is_pinned_stays(self):
        for snapshot in self.pinned:
            assert self.store.slots[snapshot.slot].snapshot is snapshot

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

    # The model

    def _start(self, tenant: str, history: tuple[tuple[int, ...], ...], hold: bool) -> Run:
        history = history[:6]
        self.histories.append((tenant, history))
        request = self._prompt(tenant, history)
        self._learn_cuts()
        depth, deepest, known = self._expected(request, tenant, history)
        self.histories = self.histories[-6:]
        run = self.engine.start(request, hold)
        found = run.lookup
        self._learn_cuts()
        self._check_depth(found.depth, depth)
        if self.shape is strong:
            assert found.deepest_known == deepest
            within = [end for end in known if end < len(request)]
            complete = found.depth == max(known, default=0)
            assert (found.outcome == "hit") == (found.depth > 0 and complete)
            assert (found.reason == "none") == (found.outcome == "hit")
            assert (found.outcome == "miss") == (found.depth == 0)
            if known and not complete:
                longer = not within or max(within) == found.depth
                assert (found.reason == "longer_than_prompt") == longer
            if not known:
                assert found.reason in ("cold", "diverged", "longer_than_prompt")
        return run

    def _check_depth(self, found: int, expected: int) -> None:
        if self.divisible:
            assert found >= expected, f"restored {found}, {expected} was kept"
        elif self.shape is strong:
            assert found == expected, f"restored {found}, {expected} was kept"
        else:
            assert found <= expected

    def _prompt(self, tenant: str, history: tuple[tuple[int, ...], ...]) -> Prompt:
        return prompt(*history, tail=(8,) if len(history) % 2 else (), tenant=tenant, shape=self.shape)

    def _expected(self, request: Prompt, tenant: str, history) -> tuple[int, int, list[int]]:
        """The deepest kept position below the last token, the deepest one computed, and all computed ones."""
        live = {}
        for snapshot in self.store.slots.snapshots():
            if not snapshot.leaving:
                row = self.store.slots[snapshot.slot]
                live[self.published[snapshot.slot, row.generation]] = snapshot
        ends = [boundary.end for boundary in request.boundaries]
        prefixes = [(tenant, history[: i + 1]) for i in range(len(history))]
        kept = [end for end, key in zip(ends, prefixes, strict=True) if key in live and end < len(request)]
        known = [end for end, key in zip(ends, prefixes, strict=True) if key in self.computed]
        return max(kept, default=0), max(known, default=0), known

    def _learn(self, run: Run) -> None:
        """Boundaries count as computed once noted, which the engine does at the end of a run."""
        if run not in self.engine.running:
            self._learn_computed(run, run.computed)

    def _learn_commits(self, run: Run, ends: set[int]) -> None:
        for end in ends:
            self._learn_computed(run, end)
        self._learn_cuts()
        for snapshot in self.store.slots.snapshots():
            key = (snapshot.slot, self.store.slots[snapshot.slot].generation)
            if key not in self.published:
                assert snapshot.node.end in ends
                self.published[key] = self._key(run, snapshot.node.end)

    def _learn_cuts(self) -> None:
        """Where states are divisible the store keeps some by itself: parts of others, up to what was computed once."""
        for snapshot in self.store.slots.snapshots() if self.divisible else ():
            place = (snapshot.slot, self.store.slots[snapshot.slot].generation)
            if place not in self.published:
                path = [snapshot.node, *snapshot.node.ancestors()]
                key = snapshot.node.tenant, tuple(tuple(array("i", node.ids)) for node in reversed(path))
                assert key in self.computed
                self.published[place] = key

    def _learn_computed(self, run: Run, end: int) -> None:
        for boundary in run.prompt.boundaries:
            if boundary.end <= end:
                self.computed.add(self._key(run, boundary.end))

    def _key(self, run: Run, end: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
        parts, start = [], 0
        for boundary in run.prompt.boundaries:
            if boundary.end <= end:
                parts.append(tuple(run.prompt.ids[start : boundary.end]))
                start = boundary.end
        return run.prompt.tenant, tuple(parts)

    def _most_free(self, fixed: set[int]) -> int:
        """Blocks that could be free at most: all but those of sequences, of readers' sources and of fixed slots."""
        stays = {block for run in self.engine.running for block in run.blocks}
        for snapshot in self.store.slots.snapshots():
            busy = self.store.slots[snapshot.slot].state is SlotState.RESTORING
            if busy or snapshot.slot in fixed:
                stays.update(snapshot.blocks)
        return self.engine.pool.total_count - len(stays)

    def _states(self, but: Reservation | None = None) -> dict[int, tuple[object, ...]]:
        table = self.store.slots
        return {
            slot: (table[slot].state, table[slot].generation, table[slot].readers, table[slot].snapshot)
            for slot in range(SLOTS)
            if self._not_of(but, slot)
        }

    def _not_of(self, reservation: Reservation | None, slot: int) -> bool:
        return reservation is None or reservation.slot != slot

    def _recency(self) -> list[tuple[object, ...]]:
        nodes = [node for root in self.store.index.roots for node in root.subtree()]
        return [(id(node), node.last_used, node.used_at, node.hits, node.slot) for node in nodes]


class WeakDigestMachine(StoreMachine):
    """The same with digests of two bits: whatever is restored must be right all the same."""

    shape = staticmethod(weak)


class DivisibleMachine(StoreMachine):
    """The same where a snapshot can be cut at any boundary before it."""

    divisible = True


COURSE = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestStore = StoreMachine.TestCase
TestStore.settings = COURSE
TestWeakDigests = WeakDigestMachine.TestCase
TestWeakDigests.settings = COURSE
TestDivisible = DivisibleMachine.TestCase
TestDivisible.settings = COURSE


class CrowdedMachine(StoreMachine):
    """The same where every slot is taken from the start, and a request has come as far as its first boundary."""

    @initialize()
    def begin(self):
        for history in (((1, 1), (2,)), ((2, 2), (1,)), ((3,), (3, 3))):
            self._whole(self._start("", history, hold=False))
        self._compute(self._start("", ((1, 2, 3), (2, 2, 2)), hold=False), 4)


# Faults of the kind that other servers had


def forget_to_remove_entries(patch):
    """The entry of a slot that is used again stays in the index."""
    patch.setattr(SnapshotIndex, "detach", lambda self, node, reason: None)


def store_less_than_the_key_says(patch):
    """A snapshot is published under a longer key than what its memory holds."""

    def shorter(slot, node, blocks, tokens, *rest):
        return Snapshot(slot, node, blocks, tokens - 1, *rest)

    patch.setattr(worker.snapshots, "Snapshot", shorter)


def free_shared_blocks(patch):
    """The end of a request frees its blocks, whoever else holds them."""

    def release(self, blocks):
        for block in blocks:
            self._free[block] = 1
            self._free_count += self._refs[block] > 0
            self._refs[block] = 0
        return 0

    patch.setattr(BlockPool, "release", release)


def take_no_references(patch):
    """A snapshot does not hold the blocks it names."""
    patch.setattr(BlockPool, "share", lambda self, blocks: None)


def trust_digests(patch):
    """S2-g: ids are not compared."""

    def walk(self, tenant, data, boundaries):
        chain, node = [], self._roots.get(tenant)
        for boundary in boundaries:
            node = node.children.get(boundary.digest) if node else None
            if node is None or node.end != boundary.end:
                break
            chain.append(node)
        return Walk(chain, None)

    patch.setattr(SnapshotIndex, "walk", walk)


def consume_on_hit(patch):
    """A hit takes the entry out of the table."""
    begin_restore = Finding.begin_restore

    def consuming(self, slot, generation, **options):
        restored = begin_restore(self, slot, generation, **options)
        self._store.retire(self._store.slots[slot].snapshot, "slots")
        return restored

    patch.setattr(Finding, "begin_restore", consuming)


def ignore_pins(patch):
    """What is pinned may be evicted."""
    stays = SnapshotStore.stays
    patch.setattr(SnapshotStore, "stays", lambda self, s: not s.pinned and stays(self, s))


def keep_the_victim_of_a_write(patch):
    """The victim of a reservation is overwritten, its entry stays: the burned slot."""

    def slot_for(self, reservation):
        for snapshot in self._store.slots.snapshots():
            if not self._store.stays(snapshot):
                self._store.slots[snapshot.slot].state = SlotState.RESERVED
                return snapshot.slot
        return None

    patch.setattr(Clearing, "slot_for", slot_for)


def take_slots_in_turn(patch):
    """S2, t2 and t3: a cursor goes on with each reservation, whatever the slot holds that it comes to."""
    turn = iter(range(10**9))

    def reserve(self):
        slot = next(turn) % SLOTS
        self._slots[slot].state = SlotState.RESERVED
        self._free = type(self._free)(free for free in self._free if free != slot)
        return slot

    patch.setattr(SlotTable, "reserve", reserve)


def drop_the_victim_when_it_is_replaced(patch):
    """S2-a: the entry of a slot that is being written goes when the new one is published, and not before."""
    keep_the_victim_of_a_write(patch)
    publish = SnapshotStore.publish

    def late(self, reservation, node, slot, blocks):
        former = self.slots[slot].snapshot
        if former is not None:
            self.index.detach(former.node, "evicted")
        publish(self, reservation, node, slot, blocks)

    patch.setattr(SnapshotStore, "publish", late)


def publish_whatever_is_in_the_slot(patch):
    """S2-b: that something was written once is taken for that it was written now: another one's state, of no less."""
    commit = Keeping.commit

    def trusting(self, reservation, tenant, ids, boundary, boundaries, blocks, **options):
        others = (snapshot.blocks for snapshot in self._store.slots.snapshots())
        there = next((kept for kept in others if len(kept) >= len(blocks)), blocks)[: len(blocks)]
        return commit(self, reservation, tenant, ids, boundary, boundaries, there, **options)

    patch.setattr(Keeping, "commit", trusting)


def keep_the_key_of_what_was_overwritten(patch):
    """S2-c: a write that is given up leaves its victim's entry, though its memory is another's by now."""
    victims = {}
    abort = Keeping.abort

    def slot_for(self, reservation):
        for snapshot in self._store.slots.snapshots():
            if not self._store.stays(snapshot) and snapshot.slot not in reservation.protect:
                victims[snapshot.slot] = snapshot
                self._store.slots[snapshot.slot].snapshot = None
                self._store.slots[snapshot.slot].state = SlotState.RESERVED
                return snapshot.slot
        return None

    def forgiving(self, reservation, cause):
        slot, written = reservation.slot, reservation.written
        abort(self, reservation, cause)
        if written and slot in victims:
            row = self._store.slots[self._store.slots.reserve()]
            row.state, row.snapshot = SlotState.READY, victims.pop(slot)

    patch.setattr(Clearing, "slot_for", slot_for)
    patch.setattr(Keeping, "abort", forgiving)


def erase_the_victim_of_nothing(patch):
    """S2-d: a reservation that is given up unwritten costs its victim the entry all the same."""
    abort = Keeping.abort

    def careless(self, reservation, cause):
        if reservation.slot is None and not reservation.written:
            reservation.slot = self._clearing.slot_for(reservation)
        abort(self, reservation, cause)

    patch.setattr(Keeping, "abort", careless)


def hand_out_what_is_set_apart(patch):
    """S2-e: the place that is for something else is one of the pool."""
    made = BlockPool.__init__

    def init(self, *sizes):
        made(self, *sizes)
        self._free[0] = 1
        self._free_count += 1

    patch.setattr(BlockPool, "__init__", init)


def discard_with_the_request(patch):
    """S2-f: what a request that is cut off has kept goes with it."""
    note = Keeping.note

    def discarding(self, tenant, ids, boundaries, computed_to):
        note(self, tenant, ids, boundaries, computed_to)
        chain = self._store.index.walk(tenant, ids.tobytes(), boundaries).chain
        kept = [node for node in chain if node.slot is not None and node.end <= computed_to]
        if computed_to < len(ids) and kept and not self._store.stays(self._store.known(kept[-1].slot)):
            self._store.remove([kept[-1].slot], "slots")

    patch.setattr(Keeping, "note", discarding)


@pytest.mark.parametrize(
    ("fault", "machine"),
    [
        (take_slots_in_turn, StoreMachine),
        (drop_the_victim_when_it_is_replaced, StoreMachine),
        (publish_whatever_is_in_the_slot, StoreMachine),
        (keep_the_key_of_what_was_overwritten, StoreMachine),
        (erase_the_victim_of_nothing, CrowdedMachine),
        (hand_out_what_is_set_apart, StoreMachine),
        (discard_with_the_request, CrowdedMachine),
        (forget_to_remove_entries, StoreMachine),
        (store_less_than_the_key_says, StoreMachine),
        (free_shared_blocks, StoreMachine),
        (take_no_references, StoreMachine),
        (trust_digests, WeakDigestMachine),
        (consume_on_hit, StoreMachine),
        (ignore_pins, StoreMachine),
        (keep_the_victim_of_a_write, StoreMachine),
    ],
)
def test_the_machine_finds_the_fault(fault, machine, monkeypatch):
    fault(monkeypatch)
    hunt = settings(COURSE, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, InvariantViolation, BlockError, IllegalTransition)):
        run_state_machine_as_test(machine, settings=hunt)
