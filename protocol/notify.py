"""Tells the service manager that started a process how it is doing: systemd's notify protocol.

One datagram a message, to the socket that the manager names in the environment. Without one nothing is sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping

BEATS_PER_WATCHDOG = 4  # so that one which is late, or lost, is no reason to be killed
_TRIES, _PAUSE_SECONDS = 20, 0.05  # for words that are said once, where the manager has not yet taken earlier ones


class Notifier:
    """Takes the manager's variables out of `environ`, so that a child of ours does not speak in our name.

    May be used from a signal handler and from any thread. A message that cannot be sent is lost: no process ends, or
    waits, for want of a listener.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        watched_pid = environ.pop("WATCHDOG_PID", str(os.getpid()))
        self._socket: socket.socket | None = None
        self.beat_seconds: float | None = None  # how often `alive` is to be called; None: nobody watches
        if not address:
            return
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if microseconds.isdecimal() and int(microseconds) and watched_pid == str(os.getpid()):
            self.beat_seconds = int(microseconds) / 1e6 / BEATS_PER_WATCHDOG
        self._next_beat = 0.0
        self._status = ""

    def ready(self, status: str) -> None:
        """Start-up is complete: from now on the watchdog runs."""
        self._send("READY=1", *self._changed(status), tries=_TRIES)

    def status(self, text: str) -> None:
        """What `systemctl status` shows; sent only where it is news."""
        if not self._send(*self._changed(text)):
            self._status = ""  # to be said again

    def stopping(self) -> None:
        self._send("STOPPING=1", *self._changed("stopping"), tries=_TRIES)

    def alive(self) -> None:
        """The process makes progress. Cheap enough to be called all the time; sent once in `beat_seconds`."""
        if self.beat_seconds is None:
            return
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self.beat_seconds
            self._send("WATCHDOG=1")

    def trigger_watchdog(self, status: str) -> None:
        """The process will not make progress again: have it ended and started anew now, not when its time is up."""
        self._send("WATCHDOG=trigger", *self._changed(status))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = self.beat_seconds = None

    def _changed(self, status: str) -> tuple[str, ...]:
        line = " ".join(status.split())  # a line break would begin another assignment
        if self._socket is None or line == self._status:
            return ()
        self._status = line
        return (f"STATUS={line}",)

    def _send(self, *assignments: str, tries: int = 1) -> bool:
        """False if the manager did not take them."""
        if self._socket is None or not assignments:
            return True
        for left in reversed(range(tries)):
            try:
                self._socket.sendto("\n".join(assignments).encode(), self._address)
            except BlockingIOError:
                if left:
                    time.sleep(_PAUSE_SECONDS)
            except OSError:
                return False
            else:
                return True
        return False
