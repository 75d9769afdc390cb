"""What a slower tier holds never exceeds its budget, and what goes for it is what was used longest ago."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import killed_writer
import pytest
from scheduler_rig import one
from tier_rig import ENTRIES, HERE, Start, TierRig, chat, folder_bytes

from worker.snapshot_index import SnapshotIndex


@pytest.mark.parametrize("entries", ENTRIES)
def test_the_budget_holds_and_the_last_used_stay(start: Start, entries: int):
    rig = start(entries=entries, disk_bytes=14_000)
    for who in range(12):
        rig.serve(chat(2, who=who))
        rig.settle()
    assert rig.disk.ledger.evictions > 0
    rig = start(entries=entries, disk_bytes=14_000)
    request = rig.serve(chat(3, who=11))
    assert rig.depth(request) == (chat(2).last.end, "hit", "none")
    gone = rig.serve(chat(3, who=0))
    assert rig.accepted(gone).depth <= 17
    rig.assert_answered(gone)
    rig.settle()


def test_a_budget_that_holds_nothing_is_no_fault(start: Start):
    rig = start(disk_bytes=100)
    for turns in (1, 2):
        rig.assert_answered(rig.serve(chat(turns)))
    rig.settle()
    assert rig.tiers.failures()["no_room"] > 0
    assert rig.disk.ledger.held == 0


def test_a_worker_killed_in_a_write_leaves_whole_files_within_the_budget(tmp_path: Path):
    limit, writes = 100_000, 7
    command = [sys.executable, str(Path(killed_writer.__file__)), str(tmp_path), str(limit), str(writes)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / HERE.fingerprint
    assert len(list(folder.glob("*.tmp"))) == 1
    assert folder_bytes(folder) <= limit
    index = SnapshotIndex(1 << 20)
    tier = killed_writer.open_tier(tmp_path, limit, index)
    try:
        assert not list(folder.glob("*.tmp"))
        assert tier.ledger.held == folder_bytes(folder)
        back = {part.node.ids: part for part in tier.ledger.parts}
        for number in range(writes - 2, writes):  # the last that were written
            part = back[(number + 1).to_bytes(4, "little")]
            wanted = killed_writer.content(number)
            reading = tier.read(part, lambda wanted=wanted: {"kv": wanted["kv"] * 0})
            reading.check()
            assert reading.tensors["kv"].equal(wanted["kv"])
    finally:
        tier.close()


def test_files_that_make_room_go_before_what_is_written_in_their_place(start: Start):
    """Deleting a large file takes long: the engine does not wait for it. What an operator removes is gone at once."""
    rig = start(disk_bytes=3000)
    for who in range(5):
        rig.serve(one(who, 9))
        rig.settle()
    before = folder_bytes(rig.disk.folder)
    rig.disk._writer.is_held = True
    rig.serve(one(9, 9))
    rig.turn_until(lambda: not rig.tiers.pending)
    assert rig.disk.ledger.evictions > 0
    assert folder_bytes(rig.disk.folder) == before
    rig.ask("flush")
    assert folder_bytes(rig.disk.folder) < 1000, "but for what the writer has to see to"
    rig.disk._writer.let_go()
    rig.settle()
    assert folder_bytes(rig.disk.folder) == rig.disk.ledger.held == 0


def test_a_disk_that_is_full_before_its_budget_costs_what_does_not_fit(small_disk: Path):
    rig = TierRig(small_disk)
    for who in range(8):
        rig.assert_answered(rig.serve(chat(2, who=who)))
        rig.settle()
    failures = rig.tiers.failures()
    assert failures["disk_full"] > 0
    assert failures["disk_full"] + failures["no_room"] == sum(failures.values()), "nothing else is wrong"
    assert rig.disk.ledger.parts
    rig.ask("flush")
    rig.serve(chat(2, who=9))
    rig.settle()
    assert sum(rig.tiers.failures().values()) == sum(failures.values()), "there is room again"
    rig.close()
    rig = TierRig(small_disk)
    assert rig.depth(rig.serve(chat(3, who=9))) == (chat(2).last.end, "hit", "none")
    assert not any(rig.store.stale_drops.values())
    rig.close()


def test_a_smaller_budget_at_the_next_start_is_kept_at_once(start: Start):
    rig = start()
    for who in range(6):
        rig.serve(chat(2, who=who))
    rig.settle()
    half = rig.disk.ledger.held // 2
    rig = start(disk_bytes=half)
    assert 0 < rig.disk.ledger.held <= half
    rig.check_disk()
