"""The run directory: owner-only, short enough for sockets, and held by one daemon."""

import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from protocol.errors import SettingsError
from protocol.limits import MAX_SOCKET_PATH_BYTES
from protocol.rundir import (
    CONTROL_SOCKET,
    METRICS_FOLDER,
    default_run_dir,
    is_in_place,
    kept_from_cleaning,
    lock_run_dir,
    prepare_run_dir,
    socket_address,
)


def test_the_directory_is_made_for_its_owner_only(tmp_path):
    run_dir = tmp_path / "a" / "b"
    prepare_run_dir(run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_an_open_directory_is_closed_to_others(tmp_path):
    for name in (CONTROL_SOCKET, "daemon.lock"):
        (tmp_path / name).touch()
    (tmp_path / METRICS_FOLDER).mkdir()
    tmp_path.chmod(0o755)
    prepare_run_dir(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_directory_with_other_files_is_not_closed_but_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=r"run_dir: .* holds other files"):
        prepare_run_dir(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    tmp_path.chmod(0o700)
    prepare_run_dir(tmp_path)


def test_a_file_in_its_place_is_refused_by_name(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(SettingsError, match="run_dir"):
        prepare_run_dir(tmp_path / "run")


def test_a_path_too_long_for_a_socket_is_refused_by_name(tmp_path):
    room = MAX_SOCKET_PATH_BYTES - len(str(tmp_path / CONTROL_SOCKET)) - 1
    fits = tmp_path / ("x" * room)
    assert socket_address(fits, CONTROL_SOCKET) == f"ipc://{fits}/{CONTROL_SOCKET}"
    with pytest.raises(SettingsError, match="run_dir: socket path"):
        prepare_run_dir(tmp_path / ("x" * (room + 1)))
    assert not (tmp_path / ("x" * (room + 1))).exists()


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path):
    prepare_run_dir(tmp_path)
    with (
        lock_run_dir(tmp_path, "worker") as lock,
        pytest.raises(SettingsError, match=r"held by another worker") as told,
    ):
        lock_run_dir(tmp_path, "worker")
    lock.close()

    assert str(os.getpid()) in str(told.value)
    with lock_run_dir(tmp_path, "gateway"), lock_run_dir(tmp_path, "worker"):
        pass


def test_a_lock_dies_with_its_process(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from protocol.rundir import lock_run_dir\n"
        "lock = lock_run_dir(Path(sys.argv[1]), 'worker'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path], check=False).returncode < 0
    lock_run_dir(tmp_path, "worker").close()


def test_the_default_is_this_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_run_dir() == tmp_path / "prefixd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")

    assert str(os.getuid()) in default_run_dir().name


def test_a_lock_is_in_place_until_its_directory_goes(tmp_path):
    run_dir = tmp_path / "run"
    prepare_run_dir(run_dir)
    with lock_run_dir(run_dir, "daemon") as lock:
        assert is_in_place(lock)
        shutil.rmtree(run_dir)
        assert not is_in_place(lock)
        prepare_run_dir(run_dir)
        with lock_run_dir(run_dir, "daemon") as other:
            assert is_in_place(other)
            assert not is_in_place(lock), "another file is in its place"


def test_a_directory_is_kept_from_cleaning_by_a_lock_of_its_own(tmp_path):
    """systemd-tmpfiles takes an exclusive one of every directory before it looks into it."""
    cleaner = os.open(tmp_path, os.O_RDONLY)
    with kept_from_cleaning(tmp_path), kept_from_cleaning(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
