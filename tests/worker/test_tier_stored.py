"""What only slower tiers have is in no slot, and still seen and acted on by the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduler_rig import Rig, one
from tier_rig import ENTRIES, HERE, Start, TierRig, break_file, chat

from protocol.control import StoredInfo, TreeNode
from worker.tiers.part_file import Identity


def stored(rig: TierRig, **args: Any) -> list[StoredInfo]:
    """All pages."""
    rows: list[StoredInfo] = []
    cursor: str | None = ""
    while cursor is not None:
        page = rig.ask("stored", cursor=cursor, **args).data
        rows += [StoredInfo(**row) for row in page["stored"]]
        cursor = page["next_cursor"]
        assert page["total"] >= len(rows)
    return [replace(row, used_age_seconds=0.0) for row in rows]


def tree(rig: TierRig, **args: Any) -> list[TreeNode]:
    return [TreeNode(**node) for node in rig.ask("tree", **args).data["nodes"]]


def restarted(start: Start, entries: int = 0, **options: Any) -> TierRig:
    """Two conversations on disk alone."""
    rig = start(entries=entries)
    for who in (1, 2):
        rig.serve(chat(2, who=who))
    rig.settle()
    return start(entries=entries, **options)


@pytest.mark.parametrize("entries", ENTRIES)
def test_after_a_restart_all_is_seen_with_its_tier(start: Start, entries: int):
    rig = restarted(start, entries)
    rows = stored(rig)
    ends = [chat(2).last.end] * 2
    assert sorted(row.tokens for row in rows) == ([17, *ends] if entries else ends)
    assert all((row.state, row.tiers, row.slot) == ("stored", ["disk"], None) for row in rows)
    assert stored(rig, limit=1) == rows
    (tier,) = rig.ask("stats").data["tiers"]
    assert tier["snapshots"] == tier["alone"] == len(rows)
    assert replace(StoredInfo(**rig.ask("show", name=rows[0].name).data), used_age_seconds=0.0) == rows[0]
    assert tree(rig) == [], "as asked for by those who know slots alone"
    nodes = tree(rig, stored=True)
    assert sorted(node.name for node in nodes) == sorted(row.name for row in rows)
    if entries:  # a state is kept at the head, too
        assert [node.level for node in nodes] == [0, 1, 1]
        assert {node.parent_name for node in nodes[1:]} == {nodes[0].name}
    leaf = next(row for row in rows if row.tokens == ends[0])
    assert 0 < leaf.own_bytes < leaf.total_bytes < tier["bytes"]


def test_what_is_loaded_moves_to_a_slot(start: Start):
    rig = restarted(start)
    rig.serve(chat(3, who=1))
    rig.settle()
    assert len(stored(rig)) == 1
    nodes = tree(rig, stored=True)
    assert {(node.slot is None, node.name == "") for node in nodes} == {(True, False), (False, True)}
    everything = stored(rig, tier="disk")
    assert {row.slot is None for row in everything} == {True, False}


@pytest.mark.parametrize("entries", ENTRIES)
def test_evicting_by_name_takes_what_only_it_needs(start: Start, entries: int):
    rig = restarted(start, entries)
    row = next(row for row in stored(rig) if row.tokens == chat(2).last.end)
    before = rig.disk.ledger.held
    dry = rig.ask("evict", slots=[], names=[row.name], dry_run=True).data
    assert rig.disk.ledger.held == before
    removed = rig.ask("evict", slots=[], names=[row.name]).data
    assert removed == dry | {"dry_run": False}
    assert removed["tier_bytes"] == row.own_bytes == before - rig.disk.ledger.held > 0
    assert (removed["names"], removed["kept"], removed["tier_snapshots"]) == ([row.name], [], 1)
    assert row.name not in {each.name for each in stored(rig)}
    rig.check_disk()
    depths = sorted(rig.accepted(rig.serve(chat(3, who=who))).depth for who in (1, 2))
    assert depths == [17, chat(2).last.end]


@pytest.mark.parametrize("entries", ENTRIES)
def test_evicting_all_leaves_nothing(start: Start, entries: int):
    rig = restarted(start, entries)
    names = [row.name for row in stored(rig)]
    held = rig.disk.ledger.held
    assert rig.ask("evict", slots=[], names=names, dry_run=True).data["tier_bytes"] == held
    assert rig.ask("evict", slots=[], names=names).data["tier_bytes"] == held
    assert (rig.disk.ledger.held, stored(rig)) == (0, [])


def test_a_name_that_has_gone_or_come_to_the_device_meanwhile_is_passed_over(start: Start):
    rig = restarted(start)
    names = [row.name for row in stored(rig)]
    rig.serve(chat(3, who=1))
    rig.settle()
    left = [row.name for row in stored(rig)]
    removed = rig.ask("evict", slots=[], names=[*names, "0" * 32]).data
    assert (removed["names"], removed["removed"]) == (left, [])
    assert rig.ask("show", name="0" * 32).error == f"nothing is stored under the name {'0' * 32}"
    assert "not stored any more" in rig.ask("export", folder="/tmp", slots=[], names=["0" * 32]).error


def test_from_one_tier_alone(start: Start):
    rig = start(host_bytes=1 << 20)
    rig.serve(chat(2))
    rig.settle()
    (row,) = stored(rig, tier="host")
    assert row.tiers == ["host", "disk"]
    assert row.slot is not None
    removed = rig.ask("evict", slots=[], names=[row.name], tier="host").data
    assert removed["removed"] == []
    assert {part.node.end for part in rig.host.ledger.parts} <= {17}, "what the head needs, at most"
    assert removed["tier_bytes"] == row.own_bytes > 0
    assert rig.disk.ledger.held > 0
    assert chat(2).last.end in rig.kept()
    assert "has no such tier" in rig.ask("stored", tier="tape").error


@pytest.mark.parametrize("entries", ENTRIES)
def test_what_is_pinned_stays_in_its_tier_whatever_is_short(start: Start, entries: int):
    rig = restarted(start, entries, disk_bytes=9000)
    row = next(row for row in stored(rig) if row.tokens == chat(2).last.end)
    assert rig.ask("pin", name=row.name).data["pinned"]
    assert rig.ask("evict", slots=[], names=[row.name]).data["kept"] == [row.name]
    for who in range(3, 12):
        rig.serve(chat(2, who=who))
        rig.settle()
    assert rig.disk.ledger.evictions
    rig.ask("flush")
    assert [each.name for each in stored(rig)] == [row.name]
    wanted = {("kv", b.end) for b in chat(2).boundaries} | ({("state", chat(2).last.end)} if entries else set())
    assert {(part.kind, part.node.end) for part in rig.disk.ledger.parts} == wanted
    loaded = [rig.serve(chat(3, who=who)) for who in (1, 2)]
    assert sorted(rig.accepted(request).depth for request in loaded) == [17 if not entries else 0, row.tokens]
    (slot,) = (s for s in rig.store.slots.snapshots() if s.node.name == row.name)
    assert slot.pinned, "on the device too"
    rig.ask("unpin", slot=slot.slot)
    rig.ask("flush")
    assert rig.disk.ledger.held == 0
    assert not rig.store.index.pinned


def test_a_pin_goes_with_the_last_of_what_was_pinned(start: Start):
    rig = start(disk_bytes=100)
    rig.serve(one(1, 12))
    rig.settle()
    rig.ask("pin", slot=0)
    rig.store.drop_stale(rig.store.known(0).node, "length")
    assert not rig.store.index.pinned
    rig.serve(one(1, 12))
    assert not rig.store.known(1).pinned


def test_what_cannot_be_restored_says_why(start: Start):
    rig = start(identity=Identity(HERE.fingerprint, "m" * 16))
    rig.serve(chat(2))
    rig.settle()
    rig = start()
    (row,) = stored(rig)
    assert (row.state, row.exact, row.tiers) == ("foreign", False, ["disk"])
    assert "cannot be restored" in rig.ask("pin", name=row.name).error
    assert rig.ask("evict", slots=[], names=[row.name]).data["tier_bytes"] == row.own_bytes
    assert rig.disk.ledger.held == 0
    rig = restarted(start)
    (middle,) = (p for p in rig.disk.ledger.parts if p.node.end == 26 and p.node.parent.end == 17 and _is_of(p, 1))
    break_file(middle.place.path, "flipped")
    rig.serve(chat(3, who=1))
    assert "incomplete" in {each.state for each in stored(rig)} or len(stored(rig)) == 1


def _is_of(part: Any, who: int) -> bool:
    return part.node.digest == chat(1, who=who).last.digest


def test_a_dry_run_of_flush_says_what_it_would_free_in_all_tiers(start: Start):
    rig = restarted(start)
    rig.serve(one(5, 8))
    rig.settle()
    dry = rig.ask("flush", dry_run=True).data
    assert (dry["removed"], dry["tier_bytes"], dry["tier_snapshots"]) == ([0], rig.disk.ledger.held, 2)
    assert rig.ask("flush").data == dry | {"dry_run": False}
    assert rig.disk.ledger.held == 0


def test_without_tiers_nothing_is_stored():
    rig = Rig()
    assert rig.ask("stored").data == {"stored": [], "next_cursor": None, "total": 0}
    assert rig.ask("show", name="x").error == "nothing is stored under the name x"
    assert "disk_cache" in rig.ask("stored", tier="disk").error
    assert rig.ask("evict", slots=[], names=[1]).error == "names: must be strings"
