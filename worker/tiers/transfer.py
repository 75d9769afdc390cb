"""Chosen snapshots as files in a folder of the operator's, and from there into the disk tier of another worker.

The files are those of the disk tier, so what they are bound to goes with them. They are linked where both folders lie
on one file system, and copied where they do not: that may take minutes, so a thread does it, one transfer at a time.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from protocol.control import Transferred
from worker.snapshot_index import Node
from worker.tiers.disk import DiskTier
from worker.tiers.folder import delete
from worker.tiers.part_file import SUFFIX, TEMPORARY, BadFile, Found, PartKind, file_name, read_header

_UNDER_WAY = Transferred(0, 0, {}, pending=True)
_NOTHING = Transferred(0, 0, {})


class TransferRefused(Exception):
    """It cannot be done; the text goes to the operator."""


class Transfers:
    """The one under way, or the last one. On the engine's thread, but for what is named otherwise."""

    def __init__(self, disk: DiskTier, *, recurs: bool) -> None:
        """`recurs`: boundaries have states."""
        self._disk = disk
        self._recurs = recurs
        self._executor = disk.executor(1, thread_name_prefix="transfer")
        self._work: Future[object] | None = None
        self._then: Callable[[object], Transferred | None] = lambda _: None
        self._release: Callable[[], None] = lambda: None
        self._ended: Transferred | TransferRefused = _NOTHING
        self._stopping = threading.Event()

    def answer(self) -> Transferred:
        """How it stands with the last one. Raises `TransferRefused` where it could not be done."""
        self.collect()
        if self._work is not None:
            return _UNDER_WAY
        if isinstance(self._ended, TransferRefused):
            raise self._ended
        return self._ended

    def collect(self) -> None:
        """Go on where a thread has done its part."""
        while self._work is not None and self._work.done():
            work, self._work = self._work, None
            try:
                ended = self._then(work.result())
            except TransferRefused as error:
                self._ended = error
            else:
                if ended is None:
                    continue  # there is more to do
                self._ended = ended
            self._release()
            self._release = lambda: None

    def close(self) -> None:
        """Give up what is under way, after the file that it is at."""
        self._stopping.set()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _begin(self, work: Callable[[], object], then: Callable[[object], Transferred | None]) -> None:
        self._then = then
        self._work = self._executor.submit(work)
        self._work.add_done_callback(lambda _: self._disk.wake())

    def _require_rest(self) -> None:
        self.collect()
        if self._work is not None:
            raise TransferRefused("another transfer is under way")

    # To a folder

    def export(self, nodes: Collection[Node], folder: Path) -> Transferred:
        """Put all files that these boundaries need into a folder. Raises `TransferRefused` before there is any."""
        self._require_rest()
        needed: dict[tuple[Node, PartKind], Path] = {}
        for node in nodes:
            wanted: list[tuple[Node, PartKind]] = [(each, "kv") for each in (*node.ancestors(), node)]
            if self._recurs:
                wanted.append((node, "state"))
            for each, kind in wanted:
                part = self._disk.find(each, kind)
                if part is None:
                    raise TransferRefused(f"the snapshot at {node.end} is not on disk, or not yet")
                needed[each, kind] = self._disk.path_of(part)
        busy = self._disk.ledger.busy
        held = Counter(node for node, _ in needed)

        def release() -> None:
            busy.subtract(held)
            for node in [node for node in held if not busy[node]]:
                del busy[node]

        busy.update(held)
        self._release = release
        self._begin(partial(self._write, list(needed.values()), folder), lambda sizes: _exported(sizes))
        return self.answer()

    def _write(self, paths: Sequence[Path], folder: Path) -> list[int]:
        """On the thread."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return [self._place(path, folder / path.name) for path in paths]
        except (OSError, ValueError) as error:
            raise TransferRefused(f"cannot write to {folder}: {_said(error)}") from error

    # From a folder

    def import_from(self, folder: Path) -> Transferred:
        """Take in all files of a folder that fit. What they hold is proved when it is asked for.

        Raises `TransferRefused` where the folder cannot be read.
        """
        self._require_rest()
        refused: Counter[str] = Counter()
        self._begin(partial(self._look, folder, refused), partial(self._make_room, refused))
        return self.answer()

    def _look(self, folder: Path, refused: Counter[str]) -> list[tuple[Path, Found]]:
        """On the thread: what is there and may be used here."""
        try:
            paths = [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
        except (OSError, ValueError) as error:
            raise TransferRefused(f"cannot read {folder}: {_said(error)}") from error
        usable: list[tuple[Path, Found]] = []
        for path in paths:
            try:
                found = read_header(path)
            except BadFile as error:
                refused[error.cause] += 1
                continue
            if self._disk.accepts(found.identity):
                usable.append((path, found))
            else:
                refused["fingerprint"] += 1
        return usable

    def _make_room(self, refused: Counter[str], usable: object) -> None:
        """Choose what fits, and promise it its room."""
        assert isinstance(usable, list)
        disk, chosen, size = self._disk, list[tuple[Path, Path]](), 0
        # What others extend comes first, so that room is never made by what is about to be used.
        for path, found in sorted(usable, key=lambda each: each[1].label.boundary.end):
            label = found.label
            target = disk.folder / file_name(label.tenant, label.boundary.digest, label.kind)
            if target.exists() or disk.writes(target):
                refused["known"] += 1
            elif not disk.ledger.room(found.size):
                refused["no_room"] += 1
            else:
                disk.ledger.promised += found.size
                size += found.size
                chosen.append((path, target))

        def release() -> None:
            disk.ledger.promised -= size

        self._release = release
        going = disk.take_going()
        self._begin(partial(self._read, chosen, going, refused), partial(self._enter, refused, release))

    def _read(
        self, chosen: Sequence[tuple[Path, Path]], going: Sequence[tuple[Path, int]], refused: Counter[str]
    ) -> list[Path]:
        """On the thread: put the files in their places, once those are gone that had to make room."""
        if not all([delete(path) for path, _ in going]):
            raise TransferRefused("no room could be made: the log says which files cannot be removed")
        placed: list[Path] = []
        for path, target in chosen:
            try:
                self._place(path, target)
                placed.append(target)
            except OSError:
                refused["unwritable"] += 1
        return placed

    def _enter(self, refused: Counter[str], release: Callable[[], None], placed: object) -> Transferred:
        assert isinstance(placed, list)
        release()
        self._release = lambda: None
        before, held = len(self._disk.ledger.parts), self._disk.ledger.held
        self._disk.enter(placed)
        added = len(self._disk.ledger.parts) - before
        if added < len(placed):
            refused["incomplete"] = len(placed) - added  # what they extend was not among them
        return Transferred(added, self._disk.ledger.held - held, dict(refused))

    def _place(self, source: Path, target: Path) -> int:
        """The same file under another name, whole or not at all; returns its size. On the thread. Raises `OSError`."""
        if self._stopping.is_set():
            raise TransferRefused("the worker is stopping")
        temporary = target.with_name(target.name + TEMPORARY)
        with suppress(FileNotFoundError):
            temporary.unlink()
        try:
            try:
                os.link(source, temporary)
            except OSError:
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))  # nobody else may ever read it
                shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return target.stat().st_size


def _said(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _exported(sizes: object) -> Transferred:
    assert isinstance(sizes, list)
    return Transferred(len(sizes), sum(sizes), {})
