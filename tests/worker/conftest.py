"""The environment is set before torch is imported: its threads sleep while they wait, or they take the cores from one
another.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tier_rig import Start, TierRig

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker with a disk tier in place of the one before, which is killed."""
    from tier_rig import TierRig

    rigs: list[TierRig] = []

    def begin(**options: Any) -> TierRig:
        if rigs:
            rigs.pop().close()
        rigs.append(TierRig(tmp_path / "cache", **options))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tiers copy one position a turn."""
    monkeypatch.setattr("worker.tiers.tiers._BUSY_SHARE", 0)
    monkeypatch.setattr("worker.tiers.tiers._BUSY_BYTES", 8)
    monkeypatch.setattr("worker.tiers.tiers._IDLE_BYTES", 8)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 pages."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
