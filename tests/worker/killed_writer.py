"""Fills a disk tier until its process is killed between the writing of a file and its being put in place.

python killed_writer.py FOLDER LIMIT WRITES
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import Executor
from pathlib import Path

import torch
from tier_rig import HERE, AtOnce

from protocol.digest import link_digest, root_digest
from protocol.messages import Boundary
from worker.events import EventLog
from worker.snapshot_index import Node, SnapshotIndex
from worker.tiers import part_file
from worker.tiers.disk import DiskTier


def open_tier(folder: Path, limit: int, index: SnapshotIndex, executor: type[Executor] = AtOnce) -> DiskTier:
    return DiskTier(folder, limit, HERE, index, EventLog(), recurs=False, executor=executor)


def plant(index: SnapshotIndex, number: int) -> Node:
    """One of many conversations of a single message."""
    ids = (number + 1).to_bytes(4, "little")
    digest = link_digest(root_digest("model", ""), memoryview(ids).cast("i"))
    return index.plant("", None, Boundary(1, digest, "message", 1), ids)


def content(number: int) -> dict[str, torch.Tensor]:
    return {"kv": torch.full((1, 4000), number)}


def main() -> None:
    folder, limit, writes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    index, done = SnapshotIndex(1 << 20), 0

    def replace(source: Path, target: Path) -> None:
        nonlocal done
        done += 1
        if done > writes:
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    part_file.os.replace = replace  # type: ignore[assignment]
    tier = open_tier(folder, limit, index)
    for number in range(writes + 1):
        tier.put(plant(index, number), "kv", content(number), ())
        tier.collect()


if __name__ == "__main__":
    main()
