"""Snapshots that an operator takes from one worker to another."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_rig import Rig
from tier_rig import ENTRIES, HERE, Start, TierRig, chat

from worker.tiers.part_file import Identity


@pytest.mark.parametrize("entries", ENTRIES)
def test_exported_snapshots_hit_elsewhere(start: Start, tmp_path: Path, entries: int):
    rig = start(entries=entries)
    for who in (1, 2):
        rig.serve(chat(3, who=who))
    rig.settle()
    (slot,) = (s.slot for s in rig.store.slots.snapshots() if s.node.end == chat(3).last.end and s.slot == 1)
    away = tmp_path / "away"
    written = rig.ask("export", folder=str(away), slots=[slot]).data
    assert written["files"] == len(list(away.iterdir())) == (5 if entries else 4)
    assert away.stat().st_mode & 0o777 == 0o700
    (away / "broken.kv.safetensors").write_bytes(b"nothing")
    elsewhere = TierRig(tmp_path / "other", entries=entries)
    try:
        taken = elsewhere.ask("import", folder=str(away)).data
        assert (taken["files"], taken["bytes"]) == (written["files"], written["bytes"])
        assert taken["refused"] == {"checksum": 1}
        assert elsewhere.ask("import", folder=str(away)).data["refused"] == {
            "checksum": 1,
            "known": taken["files"],
        }
        elsewhere.settle()
        depths = sorted(elsewhere.accepted(elsewhere.serve(chat(4, who=who))).depth for who in (1, 2))
        assert depths == [17 if not entries else 0, chat(3).last.end]
        elsewhere.settle()
    finally:
        elsewhere.close()


def test_what_does_not_fit_is_not_imported(start: Start, tmp_path: Path):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    slots = [s.slot for s in rig.store.slots.snapshots()]
    rig.ask("export", folder=str(tmp_path / "away"), slots=slots)
    for identity in (Identity("e" * 32, HERE.numerics), Identity(HERE.fingerprint, "m" * 16)):
        other = TierRig(tmp_path / "other", identity=identity)
        try:
            assert other.ask("import", folder=str(tmp_path / "away")).data["refused"] == {"fingerprint": 3}
            assert not other.disk.ledger.parts
        finally:
            other.close()


def test_what_cannot_be_exported_is_said(start: Start, tmp_path: Path):
    rig = start()
    rig.disk._writer.is_held = True
    rig.serve(chat(2))
    rig.turns(10)
    assert "is not on disk, or not yet" in rig.ask("export", folder=str(tmp_path / "away"), slots=[0]).error
    rig.disk._writer.let_go()
    rig.settle()
    assert "cannot read" in rig.ask("import", folder=str(tmp_path / "nowhere")).error
    (tmp_path / "file").touch()
    assert "cannot write to" in rig.ask("export", folder=str(tmp_path / "file"), slots=[0]).error
    assert rig.ask("export", folder="here", slots=[0]).error == "folder: must be an absolute path"
    assert "null byte" in rig.ask("export", folder="/tmp/\0", slots=[0]).error
    assert "null byte" in rig.ask("import", folder="/tmp/\0").error
    assert rig.ask("export", folder="/", slots=[99]).error == "slot 99 holds no snapshot"
    assert "needs a disk cache" in Rig().ask("import", folder="/").error


def test_a_worker_goes_on_while_files_are_copied(start: Start, tmp_path: Path):
    rig = start()
    for who in (1, 2):
        rig.serve(chat(2, who=who))
    rig.settle()
    away, threads = tmp_path / "away", rig.tiers.transfers._executor
    slots = [s.slot for s in rig.store.slots.snapshots() if s.node.end == chat(2).last.end]
    threads.is_held = True
    assert rig.ask("export", folder=str(away), slots=slots[:1]).data["pending"]
    assert rig.ask("export", folder=str(away), slots=slots).error == "another transfer is under way"
    rig.assert_answered(rig.serve(chat(3, who=1)))
    assert rig.ask("transfer").data["pending"]
    held = rig.disk.ledger.held
    rig.ask("evict", slots=slots[:1])
    assert rig.disk.ledger.held == held, "what is being copied stays"
    threads.let_go()
    assert rig.ask("transfer").data == {"files": 3, "bytes": _bytes_in(away), "refused": {}, "pending": False}
    assert not rig.disk.ledger.busy
    rig.settle()

    other = TierRig(tmp_path / "other", disk_bytes=4000)
    try:
        threads = other.tiers.transfers._executor
        threads.is_held = True
        assert other.ask("import", folder=str(away)).data["pending"]
        threads.let_go()
        threads.is_held = True
        assert other.ask("transfer").data["pending"], "there is room for it now, and it is copied"
        assert other.disk.ledger.promised == _bytes_in(away)
        other.serve(chat(2, who=1))  # the very same, in the meantime
        other.turns(10)
        threads.let_go()
        taken = other.ask("transfer").data
        assert (taken["files"], taken["pending"]) == (0, False)
        other.settle()
        assert other.accepted(other.serve(chat(3, who=1))).depth == chat(2).last.end
        other.settle()
    finally:
        other.close()


def test_room_is_made_for_what_is_imported_and_no_more(start: Start, tmp_path: Path):
    rig = start()
    rig.serve(chat(2, who=1))
    rig.settle()
    slots = [s.slot for s in rig.store.slots.snapshots()]
    rig.ask("export", folder=str(tmp_path / "away"), slots=slots)
    size = _bytes_in(tmp_path / "away")
    other = TierRig(tmp_path / "other", disk_bytes=2 * size)
    try:
        for who in range(2, 9):
            other.serve(chat(2, who=who))
            other.settle()
        taken = other.ask("import", folder=str(tmp_path / "away")).data
        assert taken["files"] + taken["refused"].get("known", 0) == len(list((tmp_path / "away").iterdir()))
        assert taken["bytes"] == sum(p.size for p in other.disk.ledger.parts if p.node.digest in _digests(rig))
        other.settle()
    finally:
        other.close()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _digests(rig: TierRig) -> set[bytes]:
    return {part.node.digest for part in rig.disk.ledger.parts if part.node.kind != "head"}


def test_to_another_file_system_files_are_copied_whole_or_not_at_all(
    start: Start, tmp_path: Path, small_disk: Path
):
    rig = start()
    for who in range(9):
        rig.serve(chat(2, who=who))
        rig.settle()
    slots = [s.slot for s in rig.store.slots.snapshots() if s.node.end == chat(2).last.end]
    assert "No space left on device" in rig.ask("export", folder=str(small_disk), slots=slots).error
    assert all(path.suffix == ".safetensors" for path in small_disk.iterdir()), "nothing half written is left"
    assert {path.stat().st_mode & 0o777 for path in small_disk.iterdir()} == {0o600}
    other = TierRig(tmp_path / "other")
    try:
        taken = other.ask("import", folder=str(small_disk)).data
        assert taken["files"] + taken["refused"].get("incomplete", 0) == len(list(small_disk.iterdir()))
        assert set(taken["refused"]) <= {"incomplete"}
        other.settle()
    finally:
        other.close()
    assert not rig.disk.ledger.busy
    rig.settle()
