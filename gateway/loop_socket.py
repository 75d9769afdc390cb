"""A ZeroMQ socket on an event loop, without a task that waits for it: what comes is taken where the loop is told of it.

That spares each message a future, the task's turn and what reaching both takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

_AT_ONCE = 100  # messages; then the loop's other work has its turn


class LoopSocket:
    """Belongs to the running loop. `take` is given every message that comes; what it raises is the loop's to report.

    The socket's descriptor only tells that something has come since the socket was last asked, and sending asks it too.
    So after each of both it is asked once more, and the loop comes back to what there is.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._take = take
        self._number = int(socket.get(zmq.FD))
        self._later: asyncio.Handle | None = None
        self._loop.add_reader(self._number, self._read)
        self._come_back()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Hand a message to ZeroMQ without waiting; False if it takes none now."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        finally:
            self._come_back()
        return True

    def close(self, linger: int) -> None:
        """`linger`: milliseconds for what has been sent."""
        self._loop.remove_reader(self._number)
        if self._later is not None:
            self._later.cancel()
        self._socket.close(linger=linger)

    def _read(self) -> None:
        self._later = None
        try:
            for _ in range(_AT_ONCE):
                if self._socket.closed or not self._has_come:
                    break
                self._take(self._socket.recv_multipart(zmq.DONTWAIT))
        finally:
            self._come_back()

    def _come_back(self) -> None:
        if self._later is None and not self._socket.closed and self._has_come:
            self._later = self._loop.call_soon(self._read)

    @property
    def _has_come(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
