"""Where the worker's sockets are: in its run directory, or at a TCP address where both sides must have CURVE keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from protocol.curve import CurveKeys, read_curve_keys
from protocol.errors import SettingsError
from protocol.limits import MAX_FRAME_BYTES
from protocol.rundir import CONTROL_SOCKET, WORK_SOCKET, socket_address

_TCP = re.compile(r"tcp://(?:[\w.-]+|\*|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One socket. `file` is set in a run directory, `keys` are for TCP."""

    address: str
    file: Path | None = None
    keys: CurveKeys | None = None

    def bind(self, socket: zmq.Socket[Any]) -> None:
        """Raises `SettingsError`."""
        self._prepare(socket)
        if self.keys is not None:
            self.keys.guard(socket)
        try:
            socket.bind(self.address)
            if self.file is not None:
                self.file.chmod(0o600)  # the directory keeps others out as well
        except (zmq.ZMQError, OSError) as error:
            raise SettingsError(f"cannot listen on {self.address}: {error.strerror}") from error

    def connect(self, socket: zmq.Socket[Any]) -> None:
        """Returns at once, whoever is there."""
        self._prepare(socket)
        if self.keys is not None:
            self.keys.show(socket)
        socket.connect(self.address)

    def _prepare(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.IPV6, int("[" in self.address))
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def check_tcp(value: str) -> str:
    """Raises `ValueError` for what is no TCP address with a port."""
    match = _TCP.fullmatch(value)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise ValueError("must be like tcp://HOST:PORT")
    return value


def work_endpoint(run_dir: Path, tcp: str | None = None, key_file: Path | None = None) -> Endpoint:
    """Where gateways reach the worker. Raises `SettingsError`."""
    return _endpoint(run_dir, WORK_SOCKET, tcp, key_file)


def control_endpoint(run_dir: Path, tcp: str | None = None, key_file: Path | None = None) -> Endpoint:
    """Where it takes commands. Raises `SettingsError`."""
    return _endpoint(run_dir, CONTROL_SOCKET, tcp, key_file)


def _endpoint(run_dir: Path, name: str, tcp: str | None, key_file: Path | None) -> Endpoint:
    if tcp is None:
        return Endpoint(socket_address(run_dir, name), run_dir / name)
    if key_file is None:
        raise SettingsError(f"curve_key: {tcp} is TCP, which is served and used with CURVE keys only")
    return Endpoint(tcp, keys=read_curve_keys(key_file))
