"""A ZeroMQ socket that threads use by turns: one waits for what comes, and all may send.

Whoever has something to send does it at once. To hand it to the thread that waits would wake that one for each
message, and both then contend for the interpreter.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq


class Wakener:
    """Ends another thread's waiting for a descriptor."""

    def __init__(self) -> None:
        self._mine, self._theirs = socket.socketpair()
        for end in (self._mine, self._theirs):
            end.setblocking(False)

    def fileno(self) -> int:
        """What to wait for."""
        return self._theirs.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # it is full, and so wakes already; or nobody waits any more
            self._mine.send(b"\0")

    def clear(self) -> None:
        """To be called before looking at what there is to do."""
        with suppress(BlockingIOError):
            while self._theirs.recv(4096):
                pass

    def close(self) -> None:
        self._mine.close()
        self._theirs.close()


class SharedSocket:
    """Sends and receives whole messages, never waiting: there must be no high-water mark.

    A ZeroMQ socket's descriptor only tells that something has come since the socket was last asked, and sending asks it
    too. So the thread that waits must have taken all there is before it waits, and a sender that finds something wakes
    it.
    """

    def __init__(self, made: zmq.Socket[bytes], wakener: Wakener) -> None:
        self._socket = made
        self._wakener = wakener
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """What to wait for, once `receive` has given None."""
        return int(self._socket.get(zmq.FD))

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises `zmq.ZMQError` where the message cannot be routed."""
        with self._lock:
            try:
                self._socket.send_multipart(frames)
            finally:
                if self._has_come:
                    self._wakener.wake()

    def receive(self) -> list[bytes] | None:
        """The next message, if one has come."""
        with self._lock:
            return self._socket.recv_multipart(zmq.DONTWAIT) if self._has_come else None

    def close(self) -> None:
        with self._lock:
            self._socket.close()

    @property
    def _has_come(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
