"""What the operator sees of slower tiers, and does to them."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, one
from tier_rig import ENTRIES, Start, chat


def test_flushing_takes_everything_but_what_is_pinned(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.serve(one(5, 8))
    rig.settle()
    (slot,) = (s.slot for s in rig.store.slots.snapshots() if s.node.end == 8)
    rig.ask("pin", slot=slot)
    removed = rig.ask("flush").data
    assert removed["tier_bytes"] > 0
    rig.settle()
    assert [part.node.end for part in rig.disk.ledger.parts] == [8]
    assert rig.depth(rig.serve(chat(3))) == (0, "miss", "flushed")


def test_flushing_reaches_what_is_being_written_and_read(start: Start):
    rig = start()
    rig.disk._writer.is_held = True
    rig.serve(chat(2))
    rig.turns(10)
    assert rig.disk.is_writing
    rig.ask("flush")
    rig.disk._writer.let_go()
    rig.settle()
    assert rig.disk.ledger.held == 0
    rig.serve(chat(2))
    rig.settle()
    rig = start()
    rig.disk._readers.is_held = True
    request = rig.generate(chat(3))
    rig.turns(3)
    assert rig.scheduler.is_loading
    rig.ask("flush")
    rig.disk._readers.let_go()
    rig.run()
    assert rig.depth(request) == (0, "miss", "flushed")
    rig.assert_answered(request)


@pytest.mark.parametrize("entries", ENTRIES)
def test_evicting_a_snapshot_takes_what_only_it_needs(start: Start, entries: int):
    rig = start(entries=entries)
    rig.serve(chat(2, who=1))
    rig.serve(chat(2, who=2))
    rig.settle()
    (slot,) = (
        s.slot for s in rig.store.slots.snapshots() if s.node.end == 35 and s.node.hits == 0 and s.slot == 1
    )
    assert rig.ask("show", slot=slot).data["tiers"] == ["disk"]
    held = rig.disk.ledger.held
    removed = rig.ask("evict", slots=[slot]).data
    assert removed["removed"] == [slot]
    rig.settle()
    assert held - rig.disk.ledger.held == removed["tier_bytes"] > 0
    rig = start(entries=entries)
    depths = sorted(rig.accepted(rig.serve(chat(3, who=who))).depth for who in (1, 2))
    assert depths == [17, 35]


def test_the_operator_sees_the_tiers(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    (tier,) = rig.ask("stats").data["tiers"]
    assert (tier["tier"], tier["bytes"]) == ("disk", rig.disk.ledger.held)
    assert tier["snapshots"] == 1


def test_without_slots_or_tiers_nothing_is_asked_of_them():
    rig = Rig()
    rig.serve(chat(2))
    assert rig.ask("stats").data["tiers"] == []
