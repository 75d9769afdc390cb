"""The run directory: where the sockets of one daemon live, and the lock that keeps others out."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from protocol.errors import SettingsError
from protocol.limits import MAX_SOCKET_PATH_BYTES

WORK_SOCKET = "work.sock"
CONTROL_SOCKET = "control.sock"
METRICS_FOLDER = "metrics"  # what gateways have counted
_LOCK_SUFFIX = ".lock"


def default_run_dir() -> Path:
    """`$XDG_RUNTIME_DIR/prefixd`, or a directory of this user's own under the system's temporary one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "prefixd" if base else Path(tempfile.gettempdir()) / f"prefixd-{os.getuid()}"


def socket_address(run_dir: Path, name: str) -> str:
    """The ZeroMQ address of a socket. Raises `SettingsError` where the path is too long for a Unix socket."""
    path = run_dir.absolute() / name
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"run_dir: socket path {path} has {size} bytes, a Unix socket takes {MAX_SOCKET_PATH_BYTES} at most"
        )
    return f"ipc://{path}"


def prepare_run_dir(run_dir: Path) -> None:
    """Make the directory owner-only. Raises `SettingsError` where that cannot be had.

    One that others may enter is closed to them only if nothing else is in it: /tmp or a home stays as it is.
    """
    for name in (WORK_SOCKET, CONTROL_SOCKET):
        socket_address(run_dir, name)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = run_dir.stat()
        if status.st_uid != os.getuid():
            raise SettingsError(f"run_dir: {run_dir} belongs to another user")
        if status.st_mode & 0o077:
            if not all(_is_ours(entry) for entry in run_dir.iterdir()):
                raise SettingsError(
                    f"run_dir: {run_dir} is open to other users and holds other files: name one of its own"
                )
            run_dir.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"run_dir: cannot use {run_dir}: {error.strerror}") from error


def _is_ours(entry: Path) -> bool:
    return entry.name in (WORK_SOCKET, CONTROL_SOCKET, METRICS_FOLDER) or entry.suffix == _LOCK_SUFFIX


def lock_run_dir(run_dir: Path, role: str) -> IO[str]:
    """Hold the directory for one process of this role until the returned file is closed or the process ends.

    Raises `SettingsError` where another daemon holds it. The lock is advisory and dies with its process, so a
    killed daemon leaves nothing to clean up.
    """
    lock = open(run_dir / f"{role}{_LOCK_SUFFIX}", "a+")  # noqa: SIM115 (the caller keeps it)
    hold(lock, f"run_dir: {run_dir} is held by another {role}")
    return lock


def is_in_place(lock: IO[str]) -> bool:
    """Whether the file that a lock is held on is still at its path: somebody may have removed its directory."""
    try:
        return os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def kept_from_cleaning(run_dir: Path) -> Iterator[None]:
    """Meanwhile systemd-tmpfiles, which clears old files out of /tmp, passes the directory over, as all locked ones."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH)
        yield
    finally:
        os.close(directory)


def hold(lock: IO[str], held: str) -> None:
    """Hold a lock file until it is closed, and write into it which process does.

    Raises `SettingsError`, which begins with `held`, where another process holds it; the file is closed then.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise SettingsError(f"{held} (process {holder})") from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
