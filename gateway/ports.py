"""The port that the gateways of one daemon share.

The kernel deals connections out to all that listen with SO_REUSEPORT, whichever daemon they belong to: so a gateway
joins those of its own run directory, and nobody else.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gateway.seats import Seat
from protocol.errors import SettingsError

if TYPE_CHECKING:
    from aiohttp import web


def take_port(host: str, port: int) -> socket.socket:
    """A socket bound to a port that nobody listens on, to a free one for 0.

    It takes no connections. Until it is closed no stranger is given the port, also as the near end of a connection, and
    whoever names it can listen there. Raises `SettingsError` where nobody can listen, or somebody does.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address[:2])
        except BaseException:
            taken.close()
            raise
    except OSError as error:
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        setting = "host" if unknown else "port"
        raise SettingsError(f"{setting}: cannot listen on {host}:{port}: {error.strerror}") from error
    return taken


async def listen(runner: web.AppRunner, host: str, port: int, seat: Seat) -> None:
    """Listen on a port that is free, or that gateways of the same run directory listen on.

    One gateway of a run directory at a time: two that start together would each take the other for a stranger.
    """
    from aiohttp import web  # here, as the daemon takes its port before it has started anything

    with ExitStack() as held:
        held.enter_context(await asyncio.to_thread(seat.turn_to_listen))
        if not seat.shares(port):
            port = held.enter_context(take_port(host, port)).getsockname()[1]
        seat.listens_on(port)
        await web.TCPSite(runner, host, port, reuse_port=hasattr(socket, "SO_REUSEPORT")).start()
