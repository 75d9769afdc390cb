"""CURVE keys (ZeroMQ's encryption and authentication), without which nothing of ours goes over TCP.

A key file is TOML: `public` and `secret` are a process's own keys, and `peers` the public keys of those that it talks
with. A worker takes who stands there; a gateway or cachectl has one peer, the worker. `prefixd keygen` makes them.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import SettingsError

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks whether a peer may connect (RFC 27)
_DOMAIN = b"prefixd"
_FORBIDDEN_MODE = stat.S_IRWXG | stat.S_IRWXO
_KEY_CHARACTERS = 40  # of Z85


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys as Z85 text."""

    public: bytes
    secret: bytes
    peers: frozenset[bytes]

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Let only peers connect to a socket that is to be bound, as far as `judgement` is asked."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody connects where nobody judges

    def show(self, socket: zmq.Socket[Any]) -> None:
        """Have a socket that is to connect prove who it is, and demand that of the other side.

        Raises `SettingsError` for keys that are a worker's.
        """
        if len(self.peers) != 1:
            raise SettingsError(f"curve_key: who connects has one peer, the worker, and not {len(self.peers)}")
        [server] = self.peers
        socket.set(zmq.CURVE_SERVERKEY, server)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)

    def judgement(self, question: Sequence[bytes]) -> list[bytes]:
        """The answer to what libzmq asks at `ZAP_ADDRESS` about a peer that has proved to have its key."""
        admitted = False
        if len(question) >= 7:
            _, _, domain, _, _, mechanism, key = question[:7]
            admitted = (
                domain == _DOMAIN and mechanism == b"CURVE" and len(key) == 32 and z85.encode(key) in self.peers
            )
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        return [b"1.0", question[1] if len(question) > 1 else b"", status, text, b"", b""]


def read_curve_keys(path: Path) -> CurveKeys:
    """Raises `SettingsError`, which names the setting and the file, and nothing of what it holds."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & _FORBIDDEN_MODE:
                raise SettingsError(f"curve_key: {path} is open to others (mode {mode:04o}): make it 0600")
            fields = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"curve_key: cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise SettingsError(f"curve_key: {path} is not TOML") from None
    match fields:
        case {"public": str(public), "secret": str(secret), "peers": [str(), *_] as peers}:
            keys = [public, secret, *peers]
        case _:
            raise SettingsError(f"curve_key: {path} must have public, secret and peers, as keygen writes them")
    if not all(isinstance(key, str) and len(key) == _KEY_CHARACTERS and key.isascii() for key in keys):
        raise SettingsError(f"curve_key: {path}: a key has {_KEY_CHARACTERS} characters")
    try:
        right = zmq.curve_public(secret.encode()) == public.encode()
    except (zmq.ZMQError, ValueError):
        right = False
    if not right:
        raise SettingsError(f"curve_key: {path}: public is not the key that belongs to secret")
    return CurveKeys(public.encode(), secret.encode(), frozenset(peer.encode() for peer in peers))


def make_curve_keys(paths: Sequence[Path]) -> None:
    """Write a worker's key file and those of its peers; one path alone is for a worker and who talks with it.

    Raises `SettingsError` where one is there already or cannot be written: then none is left.
    """
    pairs = [zmq.curve_keypair() for _ in paths]
    written: list[Path] = []
    try:
        for at, (path, (public, secret)) in enumerate(zip(paths, pairs, strict=True)):
            peers = [other for other, _ in (pairs[1:] or pairs)] if at == 0 else [pairs[0][0]]
            lines = [f'public = "{public.decode()}"', f'secret = "{secret.decode()}"']
            lines += ["peers = [", *(f'  "{peer.decode()}",' for peer in peers), "]", ""]
            write_secret(path, "\n".join(lines))
            written.append(path)
    except SettingsError:
        for path in written:
            path.unlink()
        raise


def write_secret(path: Path, text: str) -> None:
    """Make a new file that only its owner can read. Raises `SettingsError`."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(f"cannot make {path}: {error.strerror}") from error
