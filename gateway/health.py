"""How the processes of one daemon are, as far as they say: what their supervisor looks at."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.supervisor import WATCH_SECONDS, Health
from protocol.control_client import CommandRefused, ControlClient
from protocol.endpoints import Endpoint
from protocol.errors import SettingsError, WorkerUnavailable
from protocol.notify import BEATS_PER_WATCHDOG

START_SECONDS = 1800.0  # in which a worker that hangs before it can say so is not yet told from one that loads
SERVING = "serving"  # a gateway's status while the worker takes its requests

_PROBE_TIMEOUT_SECONDS = 1.0


class GatewayHealth:
    """Listens to one gateway as a service manager does: it says when it listens, how it is, and that its loop turns.

    By HTTP one could not tell apart those that share a port.
    """

    def __init__(self, run_dir: Path, number: int, hung_seconds: float) -> None:
        """Raises `SettingsError` where the socket cannot be made."""
        self._path = run_dir / f"notify-{number}.sock"
        self._hung_seconds = hung_seconds
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(str(self._path))
            self._path.chmod(0o600)
        except OSError as error:
            self._socket.close()
            raise SettingsError(f"run_dir: cannot make {self._path}: {error.strerror or error}") from error
        self.begin()

    @property
    def environment(self) -> Mapping[str, str]:
        """What its process must be started with."""
        watchdog = WATCH_SECONDS / 2 * BEATS_PER_WATCHDOG  # two signs of life between two looks
        return {"NOTIFY_SOCKET": str(self._path), "WATCHDOG_USEC": str(round(watchdog * 1e6))}

    @property
    def sees_worker(self) -> bool:
        """Whether it listens and the worker takes its requests, by its latest word."""
        self._hear()
        return self._ready and self._status == SERVING

    @property
    def listens(self) -> bool:
        self._hear()
        return self._ready

    def begin(self) -> None:
        """Forget what an earlier process has said."""
        self._hear_nothing()
        self._ready, self._status, self._heard, self._silent = False, "", False, 0

    async def __call__(self) -> Health:
        self._hear()
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if not self._ready:
            return Health("starting")
        # Looks are counted rather than seconds: when this process itself stood still, nobody else is to blame.
        if self._silent > self._hung_seconds / WATCH_SECONDS:
            return Health("hung", f"its event loop has been silent for {self._silent * WATCH_SECONDS:.0f} s")
        return Health("ready")

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _hear(self) -> None:
        for message in self._messages():
            self._heard = True
            for line in message.splitlines():
                name, _, value = line.partition("=")
                if name == "READY":
                    self._ready = True
                elif name == "STATUS":
                    self._status = value

    def _hear_nothing(self) -> None:
        for _ in self._messages():
            pass

    def _messages(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._socket.recv(1 << 16).decode(errors="replace"))
            except BlockingIOError:
                return found


class WorkerHealth:
    """Asks the worker at its control socket, which a thread of its own answers while a step runs."""

    def __init__(
        self,
        where: Path | Endpoint,
        hung_seconds: float,
        gateways: Sequence[GatewayHealth],
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._where = where
        self._start_seconds = start_seconds
        # A look in vain takes its time limit and the pause behind it.
        self._patience = math.ceil(hung_seconds / (_PROBE_TIMEOUT_SECONDS + WATCH_SECONDS))
        self._gateways = gateways
        self.begin()

    def begin(self) -> None:
        self._ready, self._loaded, self._silent = False, False, 0
        self._began = time.monotonic()

    async def __call__(self) -> Health:
        """Ready once all gateways have noticed that it is: from then on requests are served.

        While it loads it may be silent: what is imported and compiled then keeps every thread from speaking.
        """
        heartbeat = await asyncio.to_thread(self._heartbeat)
        self._silent = 0 if heartbeat else self._silent + 1
        match heartbeat:
            case {"phase": "failed", "detail": str(cause)}:
                return Health("failed", cause)
            case {"phase": "ready"}:
                self._loaded = True
                listening = [gateway for gateway in self._gateways if gateway.listens]
                self._ready |= bool(listening) and all(gateway.sees_worker for gateway in listening)
        if self._loaded and self._silent >= self._patience:
            silence = self._silent * (_PROBE_TIMEOUT_SECONDS + WATCH_SECONDS)
            return Health("hung", f"it has been silent for {silence:.0f} s")
        if not self._loaded and time.monotonic() - self._began > self._start_seconds:
            return Health("hung", f"it has not come up in {self._start_seconds:.0f} s")
        return Health("ready" if self._ready else "starting")

    def _heartbeat(self) -> object:
        """The fields of one; None where nobody answers."""
        try:
            with ControlClient(self._where, _PROBE_TIMEOUT_SECONDS) as client:
                return client.ask("health")
        except (WorkerUnavailable, CommandRefused):
            return None
