"""Files of the disk tier that are not as they were, or cannot be written: each costs its own boundary, and says why."""

from __future__ import annotations

import errno

import pytest
from scheduler_rig import one
from tier_rig import ENTRIES, Start, break_file, chat


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "grown", "header", "zeros", "zeros_behind"])
def test_a_broken_file_costs_its_own_boundary_only(start: Start, entries: int, how: str):
    rig = start(entries=entries)
    for turns in range(1, 4):
        rig.serve(chat(turns))
    rig.settle()
    (part,) = (p for p in rig.disk.ledger.parts if p.node.end == chat(3).last.end and p.kind != "state")
    break_file(part.place.path, how)
    rig = start(entries=entries)
    request = rig.serve(chat(4))
    assert rig.depth(request) == (chat(2).last.end, "partial", "stale")
    rig.assert_answered(request)
    assert rig.store.stale_drops["checksum"] == 1
    rig.settle()
    again = rig.serve(chat(5))
    assert rig.depth(again) == (chat(4).last.end, "hit", "none")


@pytest.mark.parametrize("entries", ENTRIES)
def test_a_file_that_breaks_while_the_worker_runs(start: Start, entries: int):
    """One in the middle of what is needed: nothing deeper can be had, and what lies above it can."""
    rig = start(entries=entries)
    for turns in range(1, 5):
        rig.serve(chat(turns))
    rig.settle()
    rig = start(entries=entries)
    (part,) = (p for p in rig.disk.ledger.parts if p.node.end == chat(3).last.end and p.kind == "kv")
    part.place.path.unlink()
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(2).last.end, "partial", "stale")
    assert rig.store.stale_drops["checksum"] == 1
    assert rig.tiers.failures()["unreadable"] == 1
    rig.assert_answered(request)
    rig.settle()


def test_what_a_killed_worker_leaves_is_cleared(start: Start):
    rig = start()
    for turns in (1, 2, 3):
        rig.serve(chat(turns))
    rig.settle()
    paths = {part.node.end: part.place.path for part in rig.disk.ledger.parts}
    paths[chat(1).last.end].unlink()
    half = paths[chat(2).last.end]
    half.with_name(half.name + ".tmp").write_bytes(half.read_bytes()[:50])
    (rig.disk.folder / "notes.txt").write_text("not ours")
    rig = start()
    rig.check_disk()
    assert [part.node.end for part in rig.disk.ledger.parts] == [17]
    assert (rig.disk.folder / "notes.txt").exists()


def test_a_full_disk_costs_what_could_not_be_written(start: Start, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rig = start()
    rig.serve(chat(1))
    rig.settle()
    with monkeypatch.context() as patched:
        patched.setattr("worker.tiers.part_file.os.replace", full)
        rig.assert_answered(rig.serve(chat(2)))
        rig.settle()
    assert rig.tiers.failures()["disk_full"] == 1
    rig.assert_answered(rig.serve(chat(3)))
    rig.settle()
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")
    assert not any(rig.store.stale_drops.values())


def test_a_hit_that_was_proved_wrong_is_not_found_on_disk_either(start: Start):
    rig = start(verify_hits=1.0)
    rig.serve(chat(2))
    rig.settle()
    (snapshot,) = (s for s in rig.store.slots.snapshots() if s.node.end == chat(2).last.end)
    rig.scheduler.background._clearing.distrust("", chat(2).ids, chat(2).last.end)
    rig.settle()
    assert snapshot.leaving
    assert rig.accepted(rig.serve(chat(2))).depth == chat(1).last.end


def test_a_folder_in_the_place_of_a_file_costs_that_boundary_only(start: Start):
    """It cannot be read, removed or written over: nothing else is held up by it."""
    rig = start()
    for turns in (1, 2):
        rig.serve(chat(turns))
    rig.settle()
    path = next(part.place.path for part in rig.disk.ledger.parts if part.node.end == chat(2).last.end)
    path.unlink()
    path.mkdir()
    rig = start()
    assert rig.tiers.failures()["unreadable"] == 1
    request = rig.serve(chat(3))
    assert rig.depth(request) == (chat(1).last.end, "partial", "stale")
    rig.assert_answered(request)
    rig.rest()
    rig.turn_until(lambda: not (rig.tiers.pending or rig.disk.is_writing))
    assert rig.tiers.failures()["unwritable"] == 1
    other = rig.serve(chat(2, who=5))
    rig.assert_answered(other)
    rig.turn_until(lambda: not (rig.tiers.pending or rig.disk.is_writing))
    failures = rig.tiers.failures()
    assert (failures["unreadable"], failures["unwritable"]) == (1, 1)
    path.rmdir()
    rig = start()
    assert rig.depth(rig.serve(chat(3, who=5))) == (chat(2).last.end, "hit", "none")


def test_a_file_that_cannot_be_removed_still_counts(start: Start, monkeypatch: pytest.MonkeyPatch):
    rig = start(disk_bytes=3000)
    for who in range(3):
        rig.serve(one(who, 9))
        rig.settle()
    held = rig.disk.ledger.held
    monkeypatch.setattr("worker.tiers.disk.delete", lambda path: False)
    for who in range(3, 14):
        rig.serve(one(who, 9))
        rig.turns(5)
    assert rig.tiers.failures()["unwritable"] > 0
    assert rig.tiers.failures()["no_room"] > 0
    assert rig.disk.ledger.held + rig.disk.ledger.promised >= held
