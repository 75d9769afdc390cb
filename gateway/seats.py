"""The gateways of one run directory, and what they have counted together.

Each gateway has a seat: a number, whose lock dies with the process that holds it. Every increment of its metrics is
written through to files that belong to the seat and not to the process. So what a gateway has counted outlives it,
even a killed one: whoever takes the seat next goes on from there, and until then its counts stay in every scrape.
Gauges count only while their seat is held. There are never more files than gateways that ran at one time, and the
last gateway to leave takes all of them along.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import prometheus_client.values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from protocol.errors import SettingsError
from protocol.rundir import METRICS_FOLDER, lock_run_dir

MAX_SEATS = 256
_KINDS = ("counter", "histogram", "gauge_livesum")
_PORT_LOCK = "port.lock"
_FILE_BYTES = 1 << 17  # more than the metrics of one gateway take
_FILE = re.compile(r"(?P<kind>[a-z_]+)_(?P<seat>\d+)\.db")
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_NONSENSE = (RuntimeError, ValueError, struct.error)  # what comes of reading a file that is damaged

_log = logging.getLogger("prefixd.gateway")


class Seat:
    """One gateway's place among those of its run directory, held until `close`."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `SettingsError` where there is no place left, `OSError` where there is none for its files."""
        self._run_dir = run_dir
        self._folder = run_dir / METRICS_FOLDER
        self.number, self._lock = _take_seat(run_dir)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._file("gauge_livesum").unlink(missing_ok=True)  # what is not so any more
            for kind in _KINDS:
                _make_ready(self._file(kind))
        except BaseException:
            self._lock.close()
            raise
        self._values: list[Any] = []

    @contextmanager
    def writing_through(self) -> Iterator[None]:
        """Metrics made meanwhile, every label of theirs, go on from what this seat has counted before.

        Gauges need `livesum`. A label that is first named later is not written through.
        """
        before = prometheus_client.values.ValueClass
        os.environ[_FOLDER_VARIABLE] = str(self._folder)
        try:
            made = prometheus_client.values.MultiProcessValue(lambda: self.number)  # type: ignore[no-untyped-call]
            self._values.append(made)
            prometheus_client.values.ValueClass = made
            yield
        finally:
            prometheus_client.values.ValueClass = before
            del os.environ[_FOLDER_VARIABLE]

    def totals(self) -> Iterable[Metric]:
        """What all gateways of the run directory have counted, and the gauges of those that live."""
        files = [str(path) for path in self._counted()]
        try:
            found: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        except _NONSENSE:
            found = MultiProcessCollector.merge([file for file in files if _is_sound(file)])  # type: ignore[no-untyped-call]
        return found

    def turn_to_listen(self) -> IO[str]:
        """Wait until no other gateway of the run directory looks for a port; closing the file lets the next one."""
        lock = (self._run_dir / _PORT_LOCK).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def listens_on(self, port: int) -> None:
        """Let the others know, so that they may share the port."""
        self._say(f"{os.getpid()} {port}")

    def leaves(self, port: int) -> bool:
        """Share it no longer. Whether another gateway goes on to: of those that leave together, one is told of none."""
        self._say(f"{os.getpid()}")
        return self.shares(port)

    def shares(self, port: int) -> bool:
        """Whether another gateway of the run directory listens on `port`."""
        for number in _seats(self._run_dir):
            if number != self.number and _is_held(self._run_dir, number):
                words = _lock_file(self._run_dir, number).read_text().split()
                if words[1:] == [str(port)]:
                    return True
        return False

    def close(self) -> None:
        """Leave. Metrics made in `writing_through` must not be changed any more."""
        for values in self._values:
            values.close_all_files()
        self._file("gauge_livesum").unlink(missing_ok=True)
        self._lock.close()
        forget_counts(self._run_dir)

    def _say(self, words: str) -> None:
        self._lock.truncate(0)
        self._lock.write(words)
        self._lock.flush()

    def _file(self, kind: str) -> Path:
        return self._folder / f"{kind}_{self.number}.db"

    def _counted(self) -> list[Path]:
        held = {number: _is_held(self._run_dir, number) for number in _seats(self._run_dir)}
        held[self.number] = True
        found = ((path, _FILE.fullmatch(path.name)) for path in sorted(self._folder.glob("*.db")))
        return [
            path
            for path, name in found
            if name and (not name["kind"].startswith("gauge") or held.get(int(name["seat"]), False))
        ]


class Totals(Collector):
    """What a seat has to say, for a registry."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def collect(self) -> Iterable[Metric]:
        return self._seat.totals()


def forget_counts(run_dir: Path) -> None:
    """Remove what was counted, unless a gateway lives."""
    with ExitStack() as locks:
        for number in _seats(run_dir):
            try:
                locks.enter_context(_lock_seat(run_dir, number))
            except SettingsError:
                return
        for number in _seats(run_dir):
            for kind in _KINDS:
                (run_dir / METRICS_FOLDER / f"{kind}_{number}.db").unlink(missing_ok=True)
        with suppress(OSError):  # a gateway that came meanwhile has put something in
            (run_dir / METRICS_FOLDER).rmdir()


def _take_seat(run_dir: Path) -> tuple[int, IO[str]]:
    for number in range(MAX_SEATS):
        with suppress(SettingsError):
            return number, _lock_seat(run_dir, number)
    raise SettingsError(f"run_dir: {MAX_SEATS} gateways of {run_dir} are running already")


def _lock_seat(run_dir: Path, number: int) -> IO[str]:
    return lock_run_dir(run_dir, f"gateway-{number}")


def _lock_file(run_dir: Path, number: int) -> Path:
    return run_dir / f"gateway-{number}.lock"


def _seats(run_dir: Path) -> list[int]:
    """All that were ever taken; none in a directory that somebody has removed."""
    names = (re.fullmatch(r"gateway-(\d+)\.lock", path.name) for path in run_dir.glob("*.lock"))
    return sorted(int(name[1]) for name in names if name)


def _is_held(run_dir: Path, number: int) -> bool:
    """A look that takes nothing from anybody: at worst a gateway that starts just now takes the next seat."""
    with _lock_file(run_dir, number).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _make_ready(path: Path) -> None:
    """Go on with what a file holds, or begin at nothing. Memory that is mapped must exist: a full disk is no signal."""
    if path.exists() and not _is_sound(str(path)):
        path.unlink()
    with path.open("ab") as file:
        if not file.tell():
            file.write(bytes(_FILE_BYTES))


def _is_sound(file: str) -> bool:
    try:
        MultiProcessCollector.merge([file])  # type: ignore[no-untyped-call]
    except _NONSENSE as error:
        _log.error("what %s has counted is lost: %s", file, error)
        return False
    return True
