"""The HTTP server under the application. What its parser refuses is answered and logged like any other refusal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from secrets import token_hex
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.errors import ErrorAnswer
from gateway.slow_clients import Patience, TimedConnection

ID_HEADER, ANTHROPIC_ID_HEADER = "x-request-id", "request-id"
SERVER = "prefixd"

_CLEANUP_SECONDS = 1.0  # for connections whose requests have all been answered
_FIRST_LINE = 256  # bytes that are looked at
_TOO_SLOW = 408
_NOT_AWAITED = (_TOO_SLOW, 503)
_ANTHROPIC = b" /v1/messages"

_log = logging.getLogger("prefixd.gateway")


class ServerRunner(web.AppRunner):
    """Runs an application; `refused` is told the status of what never reached it."""

    def __init__(self, app: web.Application, refused: Callable[[int], None], patience: Patience) -> None:
        # Without cancellation of handlers, a client that hangs up would go unnoticed.
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLEANUP_SECONDS)
        self._refused = refused
        self._patience = patience

    async def step_aside(self) -> None:
        """Take no more connections, and end those where nothing is asked. What is being answered goes on."""
        for site in list(self.sites):
            await site.stop()
        await asyncio.sleep(0)  # requests that have come begin to be answered
        if self.server is not None:
            self.server.pre_shutdown()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._refused, self._patience)


class _Server(web.Server):
    """Makes the connections."""

    def __init__(self, made: web.Server, refused: Callable[[int], None], patience: Patience) -> None:
        self.__dict__.update(made.__dict__)
        self._refused = refused
        self._patience = patience

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._refused, self._patience, loop=self._loop, **self._kwargs)


class _Connection(TimedConnection):
    """Knows of what the client sent only the latest line that looked like a request's first."""

    __slots__ = ("_asked", "_refused")

    def __init__(
        self, server: web.Server, refused: Callable[[int], None], patience: Patience, **kwargs: Any
    ) -> None:
        super().__init__(server, patience, partial(refused, _TOO_SLOW), **kwargs)
        self._asked = b""
        self._refused = refused

    def data_received(self, data: bytes) -> None:
        line = data[:_FIRST_LINE].partition(b"\r\n")[0]
        if b" HTTP/" in line:
            self._asked = line
        super().data_received(data)
        problem = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if isinstance(problem, HttpProcessingError):
            self._break_off(_words(problem))

    def _break_off(self, problem: str) -> None:
        """Nothing can be made of what came: whoever waits for the rest of a body is told."""
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        else:
            return
        if not body.is_eof():
            body.set_exception(web.RequestPayloadError(problem))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Behind an answer to a body that was not waited for, or is broken, nobody waits for the rest of it either."""
        body = request.content
        broken = body.exception() is not None
        if broken and not resp.prepared:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if broken or (resp.status in _NOT_AWAITED and not body.is_eof()):
            self.force_close()
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        request_id = token_hex(12)
        problem = _words(exc)
        _log.warning("request %s is no HTTP: %s", request_id, problem)
        self._refused(status)
        found = ErrorAnswer(status, f"the request is no HTTP: {problem}")
        headers = {ID_HEADER: request_id, "Server": SERVER}
        body = found.body
        if _ANTHROPIC in self._asked:
            headers[ANTHROPIC_ID_HEADER] = request_id
            body = found.anthropic_body(request_id)
        response = web.Response(
            body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
        )
        response.force_close()
        return response


def _words(problem: HttpProcessingError) -> str:
    """What the parser says, without the client's words that stand behind it."""
    return problem.message.partition("\n")[0].partition(":")[0].rstrip()
