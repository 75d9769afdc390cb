"""The folder of the disk tier: taken by one worker at a time, and its owner's alone."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import IO

from protocol.errors import SettingsError
from protocol.rundir import hold

log = logging.getLogger(__name__)

_LOCK = "lock"


class OwnFolder:
    """A folder of our own, held against other workers until it is closed."""

    def __init__(self, folder: Path, ours: Path) -> None:
        """Make it and take it. Raises `SettingsError`."""
        self._folder, self._ours = folder, ours
        self._lock = self._take()

    def renew(self) -> bool:
        """Take it again where somebody has removed it, and our lock with it: True then. Raises `OSError`."""
        try:
            if os.path.samestat(os.fstat(self._lock.fileno()), (self._ours / _LOCK).stat()):
                return False
        except FileNotFoundError:
            pass
        try:
            lock = self._take()
        except SettingsError as error:
            raise OSError(errno.EBUSY, str(error)) from error
        self._lock.close()
        self._lock = lock
        log.warning("disk cache: %s had been removed, and is begun anew", self._ours)
        return True

    def close(self) -> None:
        self._lock.close()

    def _take(self) -> IO[str]:
        folder, ours = self._folder, self._ours
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ours.mkdir(mode=0o700, exist_ok=True)
            if ours.stat().st_uid != os.getuid():
                raise SettingsError(f"disk_cache: {ours} belongs to another user")
            ours.chmod(0o700)
            lock = open(ours / _LOCK, "a+", opener=_private)  # noqa: SIM115 (kept open)
        except OSError as error:
            raise SettingsError(f"disk_cache: cannot use {folder}: {error.strerror}") from error
        hold(lock, f"disk_cache: {ours} is held by another worker")
        return lock


def others_bytes(folder: Path, ours: Path) -> int:
    """What folders of other models beside ours take, as far as we may look."""
    try:
        beside = [each for each in folder.iterdir() if each != ours and each.is_dir()]
        return sum(file.lstat().st_size for each in beside for file in each.iterdir() if file.is_file())
    except OSError:
        return 0


def delete(path: Path) -> bool:
    """False, and logged, where it is still there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("disk cache: cannot remove %s: %s", path.name, error.strerror)
        return False
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
