"""The folder of the disk tier: its owner's alone, and one worker's at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from tier_rig import Start, TierRig, chat

from protocol.errors import SettingsError


def test_only_its_owner_may_look_into_it(start: Start):
    os.umask(before := os.umask(0))
    try:
        os.umask(0)
        rig = start()
        rig.serve(chat(1))
        rig.settle()
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in rig.disk.folder.iterdir()}
    assert modes == {0o600}
    assert rig.disk.folder.stat().st_mode & 0o777 == rig.disk.folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_worker_holds_is_refused(start: Start):
    rig = start()
    with pytest.raises(
        SettingsError, match=rf"disk_cache: .* is held by another worker \(process {os.getpid()}\)"
    ):
        TierRig(rig.disk.folder.parent)
    rig.close()
    with open(rig.disk.folder / "lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="disk_cache: cannot use"):
        TierRig(tmp_path / "file")


def test_a_folder_that_is_removed_is_begun_anew(start: Start):
    """As where an operator wants its room back: what was in it is forgotten, what comes next is kept."""
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    shutil.rmtree(rig.disk.folder.parent)
    rig.serve(chat(2, who=1))
    rig.settle()
    assert rig.disk.ledger.held > 0
    assert rig.disk.folder.stat().st_mode & 0o777 == rig.disk.folder.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SettingsError, match="is held by another worker"):
        TierRig(rig.disk.folder.parent)


def test_a_removed_folder_that_another_worker_has_taken_is_left_to_it(start: Start):
    rig = start()
    rig.serve(chat(1))
    rig.settle()
    shutil.rmtree(rig.disk.folder)
    other = TierRig(rig.disk.folder.parent)
    rig.serve(chat(2))
    rig.rest()
    rig.turn_until(lambda: not rig.disk.is_writing)
    assert rig.disk.failures["unwritable"] > 0
    assert not list(rig.disk.folder.glob("*.safetensors"))
    other.close()
