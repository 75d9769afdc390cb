"""The aiohttp application: routes, and the middleware that gives every answer its id and every error its shape."""

from __future__ import annotations

import asyncio
import logging
import string
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_exceptions import HTTPException

from gateway import anthropic_api, not_here, openai_api, responses_api
from gateway.api_keys import ApiKeys
from gateway.errors import ErrorAnswer, error_answer
from gateway.faults import log_fault
from gateway.http_server import ANTHROPIC_ID_HEADER, ID_HEADER, SERVER, ServerRunner
from gateway.openapi import openapi_json
from gateway.service import ARRIVED, REQUEST_ID, TENANT, Gateway
from gateway.slow_clients import Patience
from gateway.tenants import ANYONE
from gateway.ui import Ui
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import RequestError, ServeError, WorkerUnavailable

_METRICS_SECONDS = 1.0  # how long a scrape waits for the worker
_ENCODINGS = ("", "identity", "gzip", "deflate")
_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/@+=")
_ID_LENGTH = 128
_DISCONNECTED, _TOO_SLOW = 499, 408
_ANTHROPIC_VERSION = "anthropic-version"
_OPEN_ROUTES = ("root", "health", "ready", "ui")  # whatever keys there are; the page itself shows nothing yet
_ADMIN_PATHS = ("/metrics", "/ui")  # what all tenants do shows there

_log = logging.getLogger("prefixd.gateway")
_Api = Callable[[Gateway, web.Request, bytes], Awaitable[web.StreamResponse]]


def build_runner(gateway: Gateway) -> ServerRunner:
    """The server of one gateway, not listening yet."""
    return _runner(gateway, _build_app(gateway))


def build_metrics_runner(gateway: Gateway) -> ServerRunner:
    """The server of monitoring alone, for a port that this machine alone reaches: no key is asked for."""
    app = web.Application(middlewares=[_middleware(gateway, None)])
    app.on_response_prepare.append(_name_answer)
    _add_monitoring(app, gateway, _Routes(gateway))
    return _runner(gateway, app)


def _runner(gateway: Gateway, app: web.Application) -> ServerRunner:
    settings = gateway.settings
    patience = Patience(settings.header_seconds, settings.unread_seconds)
    return ServerRunner(app, partial(gateway.metrics.answered, "other"), patience)


def _build_app(gateway: Gateway) -> web.Application:
    """All routes of one gateway."""
    routes = _Routes(gateway)
    app = web.Application(
        middlewares=[_middleware(gateway, gateway.keys)], client_max_size=gateway.settings.max_body_bytes
    )
    app.on_response_prepare.append(_name_answer)
    app.router.add_get("/", routes.root, name="root")
    app.router.add_get("/health", routes.health, name="health")
    app.router.add_get("/ready", routes.ready, name="ready")
    if gateway.settings.metrics_port is None:
        _add_monitoring(app, gateway, routes)
    app.router.add_get("/openapi.json", routes.openapi, name="openapi")
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{id:.+}", routes.model, name="models")
    app.router.add_post("/v1/chat/completions", routes.api(openai_api.chat_completions), name="chat")
    app.router.add_post("/v1/responses", routes.api(responses_api.responses), name="responses")
    app.router.add_post("/v1/responses/input_tokens", routes.api(responses_api.input_tokens), name="input_tokens")
    app.router.add_post("/v1/completions", routes.api(openai_api.completions), name="completions")
    app.router.add_post("/v1/messages", routes.api(anthropic_api.messages), name="messages")
    app.router.add_post("/v1/messages/count_tokens", routes.api(anthropic_api.count_tokens), name="count_tokens")
    return app


def _add_monitoring(app: web.Application, gateway: Gateway, routes: _Routes) -> None:
    """What shows what all tenants do."""
    app.router.add_get("/metrics", routes.metrics, name="metrics")
    if gateway.settings.ui:
        ui = Ui(routes.open_control, routes.exposition, gateway.client.why_not_ready, lambda: gateway.stopping)
        app.router.add_get("/ui", ui.page, name="ui")
        app.router.add_get("/ui/events", ui.events, name="ui_events")


class _Routes:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._control = gateway.settings.control_at

    async def root(self, request: web.Request) -> web.Response:
        named = {"name": "prefixd"}
        # Open to everybody, so that clients may look whether there is a server.
        return _json(named | {"models": self._gateway.model_names} if self._gateway.keys is None else named)

    async def health(self, request: web.Request) -> web.Response:
        """This process is up; nothing more."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Whether requests can be served now."""
        client = self._gateway.client
        beat = client.heartbeat
        if self._gateway.stopping:
            return _json({"phase": "stopping", "detail": "the server is shutting down"}, 503)
        reason = client.why_not_ready()
        if reason is None:
            return _json({"phase": "ready", "detail": ""})
        return _json({"phase": beat.phase if beat else "unreachable", "detail": reason}, 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """The metrics of all gateways, and the worker's if it answers."""
        body = await asyncio.to_thread(self.exposition)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi_json(), content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        shapes = anthropic_api if _speaks_anthropic(request) else openai_api
        return _json(shapes.model_list(self._gateway.model_names, self._gateway.model_created, self._context()))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self._gateway.model_names:
            raise openai_api.unknown_model(name)
        shapes = anthropic_api if _speaks_anthropic(request) else openai_api
        return _json(shapes.model_entry(name, self._gateway.model_created, self._context()))

    def api(self, serve: _Api) -> Handler:
        """A handler that reads the body and has the worker's help."""

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await self._gateway.receive(partial(_body, request))
            return await self._gateway.serve(partial(serve, self._gateway, request, body))

        return handle

    def _context(self) -> int | None:
        beat = self._gateway.client.heartbeat
        return beat.model.max_model_len if beat and beat.model else None

    def open_control(self) -> ControlClient:
        """Raises `WorkerUnavailable` where there is no worker."""
        return ControlClient(self._control, _METRICS_SECONDS)

    def exposition(self) -> bytes:
        """All metrics there are. Waits for the worker."""
        return self._gateway.metrics.exposition() + self._worker_metrics()

    def _worker_metrics(self) -> bytes:
        with suppress(WorkerUnavailable, CommandRefused), self.open_control() as control:
            match control.ask("metrics"):
                case {"text": str(text)}:
                    return text.encode()
        return b""


async def _body(request: web.Request) -> bytes:
    """The whole body, unpacked. Raises `RequestError`."""
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in _ENCODINGS:
        raise RequestError(f"content-encoding {encoding!r} is not supported", param="content-encoding")
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large(request)  # as it says itself: nobody need wait for the rest
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(request) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        problem = str(error).strip().rpartition("\n")[2].strip()  # before it stands what class of error it is
        raise RequestError(f"the body cannot be read: {problem}") from error


def _too_large(request: web.Request) -> RequestError:
    text = f"the body is larger than {request.client_max_size} bytes"
    return RequestError(text, code="request_too_large", status=413)


def _middleware(gateway: Gateway, keys: ApiKeys | None) -> Middleware:
    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[ARRIVED] = time.monotonic()
        request[REQUEST_ID] = _request_id(request.headers.get(ID_HEADER, ""))
        resource = request.match_info.route.resource
        route = (resource.name if resource else None) or ("models" if resource else "other")
        try:
            response = await _guarded(request, partial(_admitted, keys, route, handler))
        except asyncio.CancelledError:
            gateway.metrics.disconnects.inc()
            gateway.metrics.answered(route, _DISCONNECTED)
            raise
        gateway.metrics.answered(route, response.status)
        return response

    return handle


async def _admitted(
    keys: ApiKeys | None, route: str, handler: Handler, request: web.Request
) -> web.StreamResponse:
    """The handler's answer, if the request bears a key that its route wants. Raises `RequestError`."""
    request[TENANT] = ANYONE
    if keys is not None and route not in _OPEN_ROUTES:
        if request.path.startswith(_ADMIN_PATHS):
            keys.check_admin(request.headers)
        else:
            request[TENANT] = tenant = keys.tenant(request.headers)
            request[REQUEST_ID] = tenant.scoped(request[REQUEST_ID])
    return await handler(request)


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer."""
    response.headers[ID_HEADER] = request[REQUEST_ID]
    if _speaks_anthropic(request):
        response.headers[ANTHROPIC_ID_HEADER] = request[REQUEST_ID]
    response.headers["Server"] = SERVER


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or the error it raised as one."""
    try:
        return await handler(request)
    except ServeError as error:
        if not isinstance(error, RequestError):
            _log.warning("request %s: %s", request[REQUEST_ID], error)
        found = error_answer(error)
    except HTTPException as error:
        found = _http_error(request, error)
    except Exception as error:
        log_fault(error, "request %s failed", request[REQUEST_ID])
        found = ErrorAnswer(500, "internal error; the log has more under this request's id", code="internal_error")
    if _speaks_anthropic(request):
        response = _json(found.anthropic_body(request[REQUEST_ID]), found.anthropic_status, found.headers)
    else:
        response = _json(found.body, found.status, found.headers)
    if found.status == _TOO_SLOW:
        response.force_close()  # the rest of the body would have to be waited for
    return response


def _http_error(request: web.Request, error: HTTPException) -> ErrorAnswer:
    """What aiohttp itself refuses."""
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        words = f"{request.method} is not allowed on {request.path}; {allowed} is"
        return ErrorAnswer(405, words, headers={"Allow": allowed})
    if error.status == 404:
        served = {resource.canonical for resource in request.app.router.resources()}
        return ErrorAnswer(404, not_here.words(request.path, served))
    return ErrorAnswer(error.status, error.reason)


def _speaks_anthropic(request: web.Request) -> bool:
    """Whether the client expects the shapes of Anthropic's API. Models are listed at the same path in both."""
    either = request.path.startswith("/v1/models") or request.match_info.route.resource is None
    return (either and _ANTHROPIC_VERSION in request.headers) or request.path.startswith("/v1/messages")


def _request_id(wanted: str) -> str:
    if 0 < len(wanted) <= _ID_LENGTH and _ID_CHARACTERS.issuperset(wanted):
        return wanted
    return token_hex(12)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")
