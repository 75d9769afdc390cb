"""Chosen snapshots as files in a folder of the operator's, and from there into the disk tier of another worker.

The files are those of the disk tier, so what they are bound to goes with them. They are linked where both folders lie
on one file system, and copied where they do not.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from protocol.control import Transferred
from worker.snapshot_index import Node
from worker.tiers.disk import DiskTier
from worker.tiers.part_file import SUFFIX, TEMPORARY, BadFile, Found, PartKind, file_name, read_header


class TransferRefused(Exception):
    """It cannot be done; the text goes to the operator."""


def export_snapshots(disk: DiskTier, nodes: Collection[Node], folder: Path, *, recurs: bool) -> Transferred:
    """Put all files that these boundaries need into a folder. Raises `TransferRefused` before there is any."""
    needed: dict[tuple[Node, PartKind], Path] = {}
    for node in nodes:
        wanted: list[tuple[Node, PartKind]] = [(each, "kv") for each in (*node.ancestors(), node)]
        if recurs:
            wanted.append((node, "state"))
        for each, kind in wanted:
            part = disk.find(each, kind)
            if part is None:
                raise TransferRefused(f"the snapshot at {node.end} is not on disk, or not yet")
            needed[each, kind] = disk.path_of(part)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = [_place(path, folder / path.name) for path in needed.values()]
    except OSError as error:
        raise TransferRefused(f"cannot write to {folder}: {error.strerror}") from error
    return Transferred(len(sizes), sum(sizes), {})


def import_snapshots(disk: DiskTier, folder: Path) -> Transferred:
    """Take in all files of a folder that fit. What they hold is proved when it is asked for.

    Raises `TransferRefused` where the folder cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
    except OSError as error:
        raise TransferRefused(f"cannot read {folder}: {error.strerror}") from error
    refused: Counter[str] = Counter()
    usable: list[tuple[Path, Found]] = []
    for path in paths:
        try:
            found = read_header(path)
        except BadFile as error:
            refused[error.cause] += 1
            continue
        if disk.accepts(found.identity):
            usable.append((path, found))
        else:
            refused["fingerprint"] += 1
    count = size = 0
    # What others extend comes first, so that room is never made by what is about to be used.
    for path, found in sorted(usable, key=lambda each: each[1].label.boundary.end):
        label = found.label
        target = disk.folder / file_name(label.tenant, label.boundary.digest, label.kind)
        if target.exists():
            refused["known"] += 1
        elif not disk.make_room(size + found.size):
            refused["no_room"] += 1
        else:
            try:
                size += _place(path, target)
                count += 1
            except OSError:
                refused["unwritable"] += 1
    before = len(disk.ledger.parts)
    disk.scan()
    added = len(disk.ledger.parts) - before
    if added < count:
        refused["incomplete"] = count - added  # what they extend was not among them
    return Transferred(added, size, dict(refused))


def _place(source: Path, target: Path) -> int:
    """The same file under another name, whole or not at all; returns its size. Raises `OSError`."""
    temporary = target.with_name(target.name + TEMPORARY)
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        temporary.chmod(0o600)
    os.replace(temporary, target)
    return target.stat().st_size
