"""Faults of the kind seen in other servers, put into the store: the machine of its properties finds each."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from store_machine import COURSE, CrowdedMachine, DivisibleMachine, StoreMachine, WeakDigestMachine
from store_model import SLOTS

import worker.snapshots
from worker.block_pool import BlockError, BlockPool
from worker.invariants import InvariantViolation
from worker.slots import IllegalTransition, SlotState, SlotTable, Snapshot
from worker.snapshot_clearing import Clearing
from worker.snapshot_finding import Finding
from worker.snapshot_index import Node, SnapshotIndex, Walk
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore


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


def ignore_generations(patch):
    """What was looked up is restored from its slot, whatever that holds by now."""
    begin_restore = Finding.begin_restore

    def trusting(self, slot, generation, **options):
        return begin_restore(self, slot, self._store.slots[slot].generation, **options)

    patch.setattr(Finding, "begin_restore", trusting)


def restore_whole_messages(patch):
    """What shares a part of a message with the prompt is restored to its end, and the ids are not compared again."""
    most_stored = SnapshotIndex.most_stored

    def whole(self, tenant, data, chain):
        most = most_stored(self, tenant, data, chain)
        return most and most._replace(tokens=most.node.stored)

    patch.setattr(SnapshotIndex, "most_stored", whole)
    patch.setattr(Node, "spells", lambda self, data, tokens: True)


def name_a_part_as_the_whole(patch):
    """A snapshot that was cut keeps the key of all that it was."""
    attach = SnapshotIndex.attach
    patch.setattr(
        SnapshotIndex, "attach", lambda self, node, slot, made, _: attach(self, node, slot, made, node.end)
    )


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


def go_on_behind_what_was_given_up(patch):
    """S2, t2: a reservation that comes to nothing moves the free list on."""

    def give_back(self, slot):
        self._move(slot, SlotState.FREE, SlotState.RESERVED)
        self._free.append(slot)

    patch.setattr(SlotTable, "give_back", give_back)


def count_only_what_is_published(patch):
    """A write that is given up leaves no trace: the next one has its generation."""
    abort = Keeping.abort

    def unseen(self, reservation, cause):
        abort(self, reservation, cause)
        if reservation.written:
            self._store.slots[reservation.slot].generation -= 1

    patch.setattr(Keeping, "abort", unseen)


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
        (go_on_behind_what_was_given_up, StoreMachine),
        (count_only_what_is_published, StoreMachine),
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
        (ignore_generations, StoreMachine),
        (restore_whole_messages, DivisibleMachine),
        (name_a_part_as_the_whole, DivisibleMachine),
        (ignore_pins, StoreMachine),
        (keep_the_victim_of_a_write, StoreMachine),
    ],
)
def test_the_machine_finds_the_fault(fault, machine, monkeypatch):
    fault(monkeypatch)
    hunt = settings(COURSE, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, InvariantViolation, BlockError, IllegalTransition)):
        run_state_machine_as_test(machine, settings=hunt)
