"""Clients that are too slow: those that do not get to the end of their headers, and those that read no answer.

Either would hold a connection for ever, and an answer that nobody reads a place in the worker too. They are cut off; a
request that was being served ends as one whose client has hung up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

_log = logging.getLogger("prefixd.gateway")


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for a request's first line and headers, and for taking some of what was sent."""

    header_seconds: float
    unread_seconds: float


class TimedConnection(web.RequestHandler):
    """A connection with patience. `on_slow` is told that it came to an end before a request was complete."""

    __slots__ = ("_header_timer", "_on_slow", "_patience", "_unread_timer")

    def __init__(self, server: web.Server, patience: Patience, on_slow: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._patience = patience
        self._on_slow = on_slow
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_are_here()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self._current_request is not None:
            self._headers_are_here()
        elif data and self._is_waiting:
            self._await_headers()  # their beginning is here

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self._loop.call_later(self._patience.unread_seconds, self._cut_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    @property
    def _is_waiting(self) -> bool:
        """For a request: what has come of it, if anything, does not reach to the end of its headers."""
        return self._waiter is not None and not self._waiter.done()

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._loop.call_later(self._patience.header_seconds, self._cut_headers)

    def _headers_are_here(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cut_headers(self) -> None:
        self._header_timer = None
        if self._is_waiting:
            _log.info("cut off a client that sent no whole headers in %g s", self._patience.header_seconds)
            self._on_slow()
            self.force_close()

    def _cut_unread(self) -> None:
        self._unread_timer = None
        if self.transport is not None:
            _log.info("cut off a client that read nothing for %g s", self._patience.unread_seconds)
            self.transport.abort()
