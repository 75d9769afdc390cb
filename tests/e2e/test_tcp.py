"""Processes that reach one another over TCP, with keys."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from daemon import Daemon
from http_client import user

from protocol.curve import make_curve_keys

DONE, USAGE, UNREACHABLE = 0, 2, 3


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_a_daemon_whose_processes_talk_over_tcp(start: Callable[..., Daemon], tmp_path: Path):
    mine, other = tmp_path / "mine.key", tmp_path / "other.key"
    make_curve_keys([mine])
    make_curve_keys([other])
    work, control = free_address(), free_address()
    daemon = start("--worker-endpoint", work, "--control-endpoint", control, "--curve-key", mine)
    client = daemon.wait_ready()
    question = [user("Over TCP?")]
    assert client.chat(question).text == client.chat(question).text == client.cold(question).text
    assert client.chat(question).outcome[0] == "hit"
    assert b"prefixd_slots{" in client.get("/metrics").raw, "the worker's are there too"
    assert not [name for name in ("work.sock", "control.sock") if (daemon.run_dir / name).exists()]
    listed = daemon.cachectl("--endpoint", control, "--curve-key", mine, "list")
    assert listed.returncode == DONE, listed.stderr
    assert "message" in listed.stdout
    stranger = ("--timeout", "0.5", "--endpoint", control, "--curve-key", other, "flush")
    assert daemon.cachectl(*stranger).returncode == UNREACHABLE
    assert client.chat(question).outcome[0] == "hit", "nothing was flushed"
    refused = daemon.cachectl("--endpoint", control, "list")
    assert refused.returncode == USAGE
    assert "curve_key" in refused.stderr
