"""The disk tier: a folder of part files that one worker holds, written and read by threads of its own.

    DIR/<fingerprint>/<name>.kv.safetensors      keys and values of the tokens since the boundary before
    DIR/<fingerprint>/<name>.state.safetensors   the recurrent state at the boundary
    DIR/<fingerprint>/lock                       held while a worker runs

A file is renamed into place once all of it is written, so a worker that is killed leaves whole files, and one to be
cleared. Files are not forced to the medium (no fsync): that would slow writes and reads to save what can be computed
again. After a power cut the last half minute of writes may be missing, empty or in part zeros; the seal and the
checksums find that out as they do every other fault, and it costs those boundaries alone. All accounts are kept on the
engine's thread. What an operator or a fault removes is deleted there, at once; what makes room is deleted by the thread
that writes, before it writes.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.messages import Boundary
from protocol.sizes import format_size
from worker.events import EventLog
from worker.snapshot_index import AbsentReason, Node, SnapshotIndex
from worker.snapshots import StaleCause
from worker.tiers.folder import OwnFolder, delete, others_bytes
from worker.tiers.ledger import Ledger, Part, PartOf
from worker.tiers.part_file import (
    SUFFIX,
    TEMPORARY,
    BadFile,
    Found,
    Identity,
    Label,
    PartKind,
    Tensors,
    file_name,
    part_size,
    read_tensors,
    write_cause,
    write_file,
)
from worker.tiers.scan import adopt_all, found_files
from worker.tiers.tier import Reading

log = logging.getLogger(__name__)

BACKLOG_BYTES = 256 << 20  # of host memory for what waits to be written; one part more at most
_READERS = 4


@dataclass(frozen=True, slots=True)
class _File:
    """Where a part lies. `seal` is that of its header."""

    path: Path
    seal: str


@dataclass(slots=True, eq=False)
class _Writing:
    node: Node
    kind: PartKind
    size: int
    path: Path
    instead_of: list[tuple[Path, int]]  # files that have to go first, and their bytes
    wanted: bool = True  # False once it was flushed


class DiskTier:
    """See the module. `refusals` tells of files that were there but are not used: why, by name."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        identity: Identity,
        index: SnapshotIndex,
        events: EventLog,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        recurs: bool,
        foreign_numerics: bool = False,
        executor: Callable[..., Executor] = ThreadPoolExecutor,
    ) -> None:
        """Takes the folder and finds what is in it. Raises `SettingsError` where it cannot be had.

        `wake` is called by a thread that is done with something. `foreign_numerics`: use what was computed elsewhere.
        """
        self.folder = folder / identity.fingerprint
        self.identity = identity
        self.ledger = Ledger("disk", limit, index, self._unlink, clock, events, recurs=recurs)
        self.failures: Counter[str] = Counter()
        self.refused: Counter[StaleCause] = Counter()  # files that were found at the start and are not used
        self.refusals: dict[str, AbsentReason] = {}
        self.written_bytes = 0
        self.backlog = 0  # bytes that wait to be written
        self._index = index
        self.wake = wake
        self._clock = clock
        self._foreign_numerics = foreign_numerics
        self._pending: dict[tuple[Node, PartKind], _Writing] = {}
        self._done: queue.SimpleQueue[tuple[_Writing, str, OSError | None]] = queue.SimpleQueue()
        self._going: list[tuple[Path, int]] = []  # files of parts that have just gone, to make room
        self._own = OwnFolder(folder, self.folder)
        self._emptied = False  # by somebody who removed the folder
        self.executor = executor
        self._writer = executor(1, thread_name_prefix="disk-writer", initializer=_be_nice)
        self._readers = executor(_READERS, thread_name_prefix="disk-reader")
        self._scan()
        others = others_bytes(folder, self.folder)
        if others:
            log.info("disk cache: %s hold files of other models in %s", format_size(others), folder)

    # What there is

    def find(self, node: Node, kind: PartKind) -> Part | None:
        """A part that may be used."""
        part = self.ledger.find(node, kind)
        return None if part is None or (part.foreign and not self._foreign_numerics) else part

    def has_or_writes(self, node: Node, kind: PartKind) -> bool:
        return (node, kind) in self._pending or self.find(node, kind) is not None

    def accepts(self, identity: Identity) -> bool:
        """Whether files that are bound to this may be used here."""
        same = identity.numerics == self.identity.numerics
        return identity.fingerprint == self.identity.fingerprint and (same or self._foreign_numerics)

    def refusal(self, tenant: str, digest: bytes) -> AbsentReason | None:
        """Why what is here of a boundary cannot be used; None if nothing is, or it can."""
        names = [file_name(tenant, digest, kind) for kind in ("kv", "state")] if self.refusals else []
        return next((self.refusals[name] for name in names if name in self.refusals), None)

    @property
    def is_writing(self) -> bool:
        return bool(self._pending)

    def writes(self, path: Path) -> bool:
        """Whether a file will be put there."""
        return any(writing.path == path for writing in self._pending.values())

    @property
    def is_full(self) -> bool:
        """So much waits to be written that nothing should be added."""
        return self.backlog >= BACKLOG_BYTES

    # Writing

    def put(self, node: Node, kind: PartKind, tensors: Tensors, protect: Collection[Node]) -> bool:
        """Begin to write a part. False, and counted, where there is no room for it."""
        label = label_of(node, kind)
        size = part_size(label, self.identity, tensors)
        if not self.ledger.room(size, protect):
            self.failures["no_room"] += 1
            self.ledger.tell("fail", "no_room", node, kind)
            log.warning("disk cache: no room for %d bytes", size)
            return False
        path = self.folder / file_name(node.tenant, node.digest, kind)
        writing = _Writing(node, kind, size, path, self.take_going())
        self._pending[node, kind] = writing
        self.ledger.promised += size
        self.backlog += size
        self._writer.submit(self._write, writing, label, tensors)
        return True

    def _write(self, writing: _Writing, label: Label, tensors: Tensors) -> None:
        """On the writer's thread. To delete large files takes a while as well."""
        seal, error = "", None
        try:
            self._emptied |= self._own.renew()
            writing.instead_of = [(path, size) for path, size in writing.instead_of if not delete(path)]
            if writing.instead_of:
                raise OSError(errno.EBUSY, "no room could be made")
            seal = write_file(writing.path, label, self.identity, tensors)
        except OSError as caught:
            error = caught
        self._done.put((writing, seal, error))
        self.wake()

    def collect(self) -> None:
        """Enter what has been written."""
        while not self._done.empty():  # this thread alone takes from it
            writing, seal, error = self._done.get_nowait()
            if self._emptied:
                self._emptied = False
                parts, busy = self.ledger.parts, self.ledger.busy
                self.ledger.flush({(part.node, part.kind) for part in parts if part.node in busy})
            del self._pending[writing.node, writing.kind]
            self.ledger.promised -= writing.size
            self.backlog -= writing.size
            self._still_there(writing.instead_of)
            if error is not None:
                cause = write_cause(error)
                self.failures[cause] += 1
                self.ledger.tell("fail", cause, writing.node, writing.kind)
                log.warning("disk cache: cannot write %s: %s", writing.path.name, error.strerror)
                continue
            former = self.ledger.find(writing.node, writing.kind)
            if former is not None:  # a foreign one, in whose place the new one is
                self.ledger.drop(former, "not_kept", replaced=True)
            self.refusals.pop(writing.path.name, None)
            if not writing.wanted or writing.node.parent is None:
                delete(writing.path)
                continue
            self.written_bytes += writing.size
            place = _File(writing.path, seal)
            self.ledger.add(Part(writing.node, writing.kind, writing.size, place, self._clock()))

    # Reading

    def read(self, part: Part, to: Callable[[], Tensors]) -> Reading:
        """Read a part on a thread."""
        room = to()
        future = self._readers.submit(_read, part.place, room)
        future.add_done_callback(lambda _: self.wake())
        part.used_at = self._clock()
        return Reading(room, future)

    def path_of(self, part: Part) -> Path:
        assert isinstance(part.place, _File)
        return part.place.path

    # Going

    def flush(self, keep: Collection[PartOf]) -> int:
        """Drop everything but these parts; returns the bytes that came free."""
        for writing in self._pending.values():
            writing.wanted = writing.wanted and (writing.node, writing.kind) in keep
        self.refusals.clear()
        return self.ledger.flush(keep)

    def drop(self, node: Node, reason: AbsentReason) -> None:
        """Neither what is here of a boundary nor what is being written will be found."""
        for kind in ("kv", "state"):
            writing = self._pending.get((node, kind))
            if writing is not None:
                writing.wanted = False
        self.ledger.drop_node(node, reason)

    def note_use(self) -> None:
        """Tell the next worker, by the times of files, what has been used on the device since it was written."""
        past = time.time() - self._clock()  # what the clock calls 0
        for part in self.ledger.parts:
            if part.node.used_at > part.used_at:
                with suppress(OSError):
                    os.utime(self.path_of(part), (past + part.node.used_at,) * 2)

    def close(self) -> None:
        """Wait for the file that is being written, and let the folder go."""
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._own.close()

    def _unlink(self, part: Part, at_once: bool) -> None:
        """What makes room for a part goes on the writer's thread, just before that part is written."""
        assert isinstance(part.place, _File)
        self.refusals.pop(part.place.path.name, None)
        if not at_once:
            self._going.append((part.place.path, part.size))
        elif not delete(part.place.path):
            self._still_there([(part.place.path, part.size)])

    def _still_there(self, files: Iterable[tuple[Path, int]]) -> None:
        """They could not be deleted: what they take is not to be had."""
        for _, size in files:
            self.failures["unwritable"] += 1
            self.ledger.promised += size

    def take_going(self) -> list[tuple[Path, int]]:
        """The files, and their bytes, that `Ledger.room` has let go: whoever takes them deletes them."""
        going, self._going = self._going, []
        return going

    # What others have left here

    def _scan(self) -> None:
        """Enter all files that are there and can be used. What is left of a write goes, and what is too much."""
        for path in self.folder.glob("*" + SUFFIX + TEMPORARY):
            delete(path)
        self.enter(sorted(self.folder.glob("*" + SUFFIX)))
        self.ledger.room(0)
        self._still_there([(path, size) for path, size in self.take_going() if not delete(path)])
        log.info("disk cache: %d files with %d bytes in %s", len(self.ledger.parts), self.ledger.held, self.folder)

    def enter(self, paths: Collection[Path]) -> None:
        """Enter those of these files that can be used and are not known yet; the others are removed."""
        known = {self.path_of(part) for part in self.ledger.parts}
        found = found_files((path for path in paths if path not in known), self.identity, self._refuse)
        adopt_all(self._index, found, self._adopt)

    def _refuse(self, path: Path, error: BadFile) -> None:
        """A file cannot be used: it is removed, and will be told of to whoever asks for what it was."""
        is_foreign = error.cause == "fingerprint"
        self.failures[error.cause] += 1
        self.refused["fingerprint" if is_foreign else "checksum"] += 1
        self.refusals[path.name] = "fingerprint" if is_foreign else "stale"
        log.warning("disk cache: %s is not used: %s", path.name, error)
        delete(path)

    def _adopt(self, parent: Node, kind: PartKind, path: Path, head: Found) -> Node | None:
        label = head.label
        if label.start != parent.end or label.parent != parent.digest:
            return None
        try:
            node = self._index.plant(parent.tenant, parent if parent.digest else None, label.boundary, label.ids)
            age = max(0.0, time.time() - path.stat().st_mtime)
        except (ValueError, OSError):
            return None
        if self.ledger.find(node, kind) is not None:
            return None
        foreign = head.identity.numerics != self.identity.numerics
        if foreign and not self._foreign_numerics:
            self.refusals[path.name] = "fingerprint"
            self.refused["fingerprint"] += 1
        place = _File(path, head.seal)
        self.ledger.add(Part(node, kind, head.size, place, self._clock() - age, foreign), is_new=False)
        return node


def label_of(node: Node, kind: PartKind) -> Label:
    parent = node.parent
    assert parent is not None
    boundary = Boundary(node.end, node.digest, node.kind, node.messages)
    return Label(kind, node.tenant, parent.digest, parent.end, boundary, node.ids)


def _read(place: _File, to: Tensors) -> None:
    read_tensors(place.path, place.seal, to)
    with suppress(OSError):
        os.utime(place.path)  # its age, for the next start


def _be_nice() -> None:
    """Writing is less urgent than everything else that the worker does. A thread has a priority of its own on Linux."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
