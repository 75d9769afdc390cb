"""The asking side of the control socket, one command at a time."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from protocol.codec import decode, encode
from protocol.endpoints import Endpoint, control_endpoint
from protocol.errors import ProtocolError, VersionMismatch, WorkerUnavailable
from protocol.messages import Command, Reply


class CommandRefused(Exception):
    """The worker was reached and said no. The message is its reason."""


class ControlClient:
    """A connection to the worker of one run directory, or elsewhere. Not for use by two threads at a time.

    Raises `WorkerUnavailable` at once where there is no socket.
    """

    def __init__(self, where: Path | Endpoint, timeout_seconds: float) -> None:
        endpoint = where if isinstance(where, Endpoint) else control_endpoint(where)
        self._address = endpoint.address
        if endpoint.file is not None and not _is_there(endpoint.file):
            raise WorkerUnavailable(f"no worker runs in {endpoint.file.parent}")
        self._timeout_seconds = timeout_seconds
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = round(self._timeout_seconds * 1000)  # who was turned away has nobody to send to
        endpoint.connect(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def ask(self, verb: str, **args: object) -> object:
        """The data of the worker's reply.

        Raises `WorkerUnavailable` where none comes in time and `CommandRefused` where the worker says no. A late
        reply to an earlier command is dropped.
        """
        command = Command(secrets.token_hex(8), verb, args)
        deadline = time.monotonic() + self._timeout_seconds
        try:
            frames = encode(command)
        except TypeError as error:  # of a number beyond 64 bits, which no worker can know of
            raise CommandRefused(f"{verb}: {error}") from error
        with suppress(zmq.Again):
            self._socket.send_multipart(frames)
        while self._socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            try:
                reply = decode(self._socket.recv_multipart())
            except VersionMismatch as error:
                raise WorkerUnavailable(f"cannot talk to the worker at {self._address}: {error}") from error
            except ProtocolError as error:
                raise WorkerUnavailable(f"the worker at {self._address} answers nonsense: {error}") from error
            if isinstance(reply, Reply) and reply.command_id == command.command_id:
                if reply.error is not None:
                    raise CommandRefused(reply.error)
                return reply.data
        raise WorkerUnavailable(f"no worker answers at {self._address} within {self._timeout_seconds:g} s")


def _is_there(socket: Path) -> bool:
    """Raises `WorkerUnavailable` in a directory that is closed to this user."""
    try:
        return socket.exists()
    except PermissionError as error:
        raise WorkerUnavailable(f"cannot look into {socket.parent}: {error.strerror}") from error
