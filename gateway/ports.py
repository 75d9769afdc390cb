"""The port that the gateways of one daemon share.

The kernel deals connections out to all that listen with SO_REUSEPORT, whichever daemon they belong to: so a gateway
joins those of its own run directory, and nobody else.
"""

from __future__ import annotations

import errno
import socket

from aiohttp import web

from gateway.seats import Seat
from protocol.errors import SettingsError


def free_port(host: str, port: int) -> int:
    """`port`, or one that is free for 0. Raises `SettingsError` where nobody can listen there, or somebody does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.create_server(address[:2], family=family) as probe:
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        setting = "host" if unknown else "port"
        raise SettingsError(f"{setting}: cannot listen on {host}:{port}: {error.strerror}") from error


async def listen(runner: web.AppRunner, host: str, port: int, seat: Seat) -> None:
    """Listen on a port that is free, or that gateways of the same run directory listen on."""
    if not seat.shares(port):
        port = free_port(host, port)
    seat.listens_on(port)
    await web.TCPSite(runner, host, port, reuse_port=hasattr(socket, "SO_REUSEPORT")).start()
