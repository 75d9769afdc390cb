import pytest

from worker.slots import IllegalTransition, SlotState, SlotTable, Snapshot
from worker.snapshot_index import Node


def snapshot_in(slot: int) -> Snapshot:
    return Snapshot(slot, Node("", None, b"", None), (1,), 4, 0.0, absorbed=False)


def ready(table: SlotTable) -> int:
    slot = table.reserve()
    assert slot is not None
    table.begin_write(slot)
    table.publish(snapshot_in(slot))
    return slot


def test_a_slot_walks_from_free_to_ready_and_back():
    table = SlotTable(1)
    slot = ready(table)
    assert table[slot].state is SlotState.READY
    table.begin_evict(slot)
    assert table.snapshots() != []
    table.finish_evict(slot)
    assert table[slot].state is SlotState.FREE
    assert table.snapshots() == []
    assert table.free_slots == (0,)


def test_only_a_write_bumps_the_generation():
    table = SlotTable(1)
    slot = ready(table)
    assert table[slot].generation == 1
    table.acquire(slot)
    table.release(slot)
    table.begin_evict(slot)
    table.finish_evict(slot)
    assert table.reserve() == slot
    table.give_back(slot)
    assert table[slot].generation == 1
    assert ready(table) == slot
    assert table[slot].generation == 2


def test_a_reservation_given_back_leaves_the_free_list_as_it_was():
    table = SlotTable(3)
    before = table.free_slots
    first, second = table.reserve(), table.reserve()
    table.give_back(second)
    table.give_back(first)
    assert table.free_slots == before


def test_no_slot_is_reserved_twice():
    table = SlotTable(2)
    assert {table.reserve(), table.reserve()} == {0, 1}
    assert table.reserve() is None


def test_a_slot_is_restoring_until_its_last_reader_is_done():
    table = SlotTable(1)
    slot = ready(table)
    table.acquire(slot)
    table.acquire(slot)
    table.release(slot)
    assert table[slot].state is SlotState.RESTORING
    with pytest.raises(IllegalTransition):
        table.begin_evict(slot)
    table.release(slot)
    assert table[slot].state is SlotState.READY
    assert table[slot].readers == 0


@pytest.mark.parametrize("act", ["give_back", "begin_write", "acquire", "release", "begin_evict", "finish_evict"])
def test_a_free_slot_can_only_be_reserved(act):
    table = SlotTable(1)
    with pytest.raises(IllegalTransition):
        getattr(table, act)(0)
    assert table[0].state is SlotState.FREE
    assert table.free_slots == (0,)


@pytest.mark.parametrize("act", ["begin_write", "give_back", "finish_evict", "release"])
def test_a_ready_slot_is_not_written(act):
    table = SlotTable(1)
    slot = ready(table)
    with pytest.raises(IllegalTransition):
        getattr(table, act)(slot)
    assert table[slot].generation == 1


def test_a_reserved_slot_is_not_published_without_a_write():
    table = SlotTable(1)
    slot = table.reserve()
    with pytest.raises(IllegalTransition):
        table.publish(snapshot_in(slot))


def test_counts_have_every_state():
    table = SlotTable(3)
    ready(table)
    table.reserve()
    assert table.counts() == {"free": 1, "reserved": 1, "writing": 0, "ready": 1, "restoring": 0, "evicting": 0}


def test_no_slots_disable_and_fewer_are_refused():
    assert SlotTable(0).reserve() is None
    with pytest.raises(ValueError, match="-1"):
        SlotTable(-1)


@pytest.mark.parametrize("slot", [-1, 2])
def test_there_is_no_slot_outside_the_table(slot):
    with pytest.raises(IndexError):
        SlotTable(2)[slot]
