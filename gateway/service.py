"""What all handlers of one gateway share, and the two ways of answering: whole and as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import orjson
from aiohttp import web

from gateway import sse
from gateway.absorb import next_turn
from gateway.answer import Answer, cache_line, cache_report
from gateway.api_keys import ApiKeys
from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.faults import log_fault
from gateway.hints import hinted
from gateway.metrics import GatewayMetrics
from gateway.prompts import PromptMaker
from gateway.quick import is_quick
from gateway.reply import ReplyReader
from gateway.reply_reader import ReplyReaders
from gateway.tenants import Tenant
from gateway.turn import Delta, Turn
from gateway.worker_client import WorkerClient
from protocol.errors import RequestError, ServeError, WorkerUnavailable
from protocol.messages import Generate
from protocol.model_path import resolve_model

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
ARRIVED: web.RequestKey[float] = web.RequestKey("arrived", float)
TENANT: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)
CACHE_HEADER = "x-prefixd-cache"

_HEADER_SECONDS = 0.15  # after a request came its stream's headers go out, whether its lookup is done or not
_LAST_WORDS_SECONDS = 2.0  # for handlers to say why, after the grace period
_STOPPING = "the server is shutting down"
_THREADS = 2
_LARGE_BYTES = 1 << 20  # of a body: what is new in it may take a second to encode
_REMEMBERED_IDS = 4096
_AS_TEXT = ReplyReader()

_log = logging.getLogger("prefixd.gateway")
_Result = TypeVar("_Result")


class Gateway:
    """One gateway process. Used on one event loop; long prompts are made on its threads."""

    def __init__(self, settings: GatewaySettings, maker: PromptMaker, client: WorkerClient) -> None:
        self.settings = settings
        self.maker = maker
        self.readers = ReplyReaders(maker, settings)
        self.client = client
        self.keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
        client.vocabulary = lambda: maker.vocabulary
        self.metrics = GatewayMetrics(settings.run_dir)
        self.metrics.watch(client)
        if self.keys is not None:
            self.keys.on_read = self.metrics.api_keys_read
        self.stopping = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompt")
        self._patient = ThreadPoolExecutor(1, thread_name_prefix="patient")  # what would hold the others up
        self._open = 0
        self._receiving: set[asyncio.Timeout] = set()
        self._ids: dict[str, None] = {}  # of the last requests, oldest first
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self.model_names = model_names(settings)
        # The file's own time: it is the same in every gateway, and after each start.
        self.model_created = int(resolve_model(settings.model).stat().st_mtime)

    async def work_on(self, body: bytes, tenant: Tenant, work: Callable[[], _Result]) -> _Result:
        """Run pure work on a body, off the event loop unless it `is_quick`.

        Large ones wait for one another, and small ones for none.
        """
        if is_quick(self.maker.bodies, tenant.name, body):
            return work()
        threads = self._patient if len(body) > _LARGE_BYTES else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def receive(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read a body within the time it may take. Raises `ServeError`; stopping does not wait for it."""
        if self.stopping:
            raise WorkerUnavailable(_STOPPING)
        seconds = self.settings.body_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                self._receiving.add(limit)
                try:
                    return await read()
                finally:
                    self._receiving.remove(limit)
        except TimeoutError as error:
            if self.stopping:
                raise WorkerUnavailable(_STOPPING) from error
            raise RequestError(
                f"the body did not arrive within {seconds:g} seconds", code="request_timeout", status=408
            ) from error

    async def serve(self, handler: Callable[[], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Run the handler of a request that needs the worker; counted, and refused while stopping."""
        if self.stopping:
            raise WorkerUnavailable(_STOPPING)
        self._open += 1
        self._all_ended.clear()
        self.metrics.open_requests.set(self._open)
        try:
            return await handler()
        finally:
            self._open -= 1
            self.metrics.open_requests.set(self._open)
            if not self._open:
                self._all_ended.set()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let open requests end within the grace period, or until `hurry` is set; then end them with an error.

        Those whose body is still being read are refused at once.
        """
        self.stopping = True
        for limit in self._receiving:
            if not limit.expired():
                limit.reschedule(0)
        ended, hurried = (asyncio.create_task(event.wait()) for event in (self._all_ended, hurry))
        await asyncio.wait(
            (ended, hurried), timeout=self.settings.grace_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        if self._open:
            _log.warning("%d open requests end with an error: the server is shutting down", self._open)
            self.client.fail_open(WorkerUnavailable(_STOPPING), "shutdown")
            await asyncio.wait((ended,), timeout=_LAST_WORDS_SECONDS)
        ended.cancel()

    def close(self) -> None:
        for threads in (self._threads, self._patient):
            threads.shutdown(wait=False, cancel_futures=True)
        self.metrics.close()

    def free_id(self, wanted: str) -> str:
        """The id itself, or with something added where one of the last requests had it.

        A client that hangs up and tries again may send the same id while the worker still lets go of the first.
        """
        free = wanted
        while free in self._ids:
            free = f"{wanted}-{token_hex(3)}"
        self._ids[free] = None
        if len(self._ids) > _REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]
        return free

    async def answer(
        self,
        request: web.Request,
        requests: Sequence[Generate],
        stops: Sequence[str],
        answer: Answer,
        stream: bool,
        conversation: Conversation | None = None,
        reader: ReplyReader = _AS_TEXT,
    ) -> web.StreamResponse:
        """Have the worker serve the prompts and send its answer. Raises `ServeError` before any byte is sent.

        `reader` takes the answer apart: `self.readers.reader(...)` for a chat.
        A `conversation` whose answer ends well is absorbed: what its next turn will send is computed in idle time.
        """
        tenant = request[TENANT]
        requests = [tenant.own(hinted(each, conversation, request.headers, tenant.salt)) for each in requests]
        with Turn(self.client, requests, self.maker.token_bytes, stops, reader) as turn:
            timing = _Timing(request[ARRIVED])
            response = (
                await self._stream(request, turn, answer, timing)
                if stream
                else await self._whole(request, turn, answer, timing)
            )
            if turn.done:
                self._account(request, turn, timing)
                if conversation is not None:
                    self._absorb(request[REQUEST_ID], conversation, turn, tenant)
            return response

    def _absorb(self, request_id: str, conversation: Conversation, turn: Turn, tenant: Tenant) -> None:
        """Of several choices nobody knows which one goes on, and a cut-off answer is seldom echoed."""
        reply, reason = turn.reply(0)
        if turn.choices != 1 or reason not in ("stop", "tool_calls") or not self.settings.absorb or self.stopping:
            return
        try:
            model = self.client.model()
        except WorkerUnavailable:
            return  # it was lost a moment after the answer: that stands

        def work() -> None:
            message = next_turn(self.maker, model, request_id, conversation, reply, tenant)
            if message is not None:
                loop.call_soon_threadsafe(self.client.absorb, message)

        def ended(done: Future[None]) -> None:
            """Nobody waits for the work: a fault in it is told here. While stopping the loop may have closed."""
            fault = None if done.cancelled() or self.stopping else done.exception()
            if fault is not None:
                self.metrics.absorb_faults.inc()
                log_fault(fault, "request %s: its answer cannot be absorbed", request_id)

        loop = asyncio.get_running_loop()
        self._patient.submit(work).add_done_callback(ended)

    async def _whole(self, request: web.Request, turn: Turn, answer: Answer, timing: _Timing) -> web.Response:
        deltas: list[Delta] = []
        while not turn.done:
            gained = await turn.wait() or []
            timing.note(gained)
            deltas += gained
        headers = {CACHE_HEADER: cache_line(turn) or ""}
        body = answer.whole(deltas, turn)
        return web.Response(body=orjson.dumps(body), content_type="application/json", headers=headers)

    async def _stream(
        self, request: web.Request, turn: Turn, answer: Answer, timing: _Timing
    ) -> web.StreamResponse:
        gained = await turn.wait(max(request[ARRIVED] + _HEADER_SECONDS - time.monotonic(), 0)) or []
        response = web.StreamResponse(headers=sse.HEADERS)
        if line := cache_line(turn):
            response.headers[CACHE_HEADER] = line
        try:
            await response.prepare(request)
            await response.write(answer.opening(turn))
            await self._send_events(response, turn, answer, timing, gained)
        except ConnectionError:
            self.metrics.disconnects.inc()
        except ServeError as error:
            said = (
                "refused by the worker" if isinstance(error, RequestError) else error
            )  # the client's own words else
            _log.warning("request %s broke off: %s", request[REQUEST_ID], said)
            await _break_off(response, answer.broken(error))
        except Exception as error:
            log_fault(error, "request %s broke off", request[REQUEST_ID])
            await _break_off(
                response, answer.broken(ServeError("internal error; the log has more under this request's id"))
            )
        return response

    async def _send_events(
        self, response: web.StreamResponse, turn: Turn, answer: Answer, timing: _Timing, gained: list[Delta] | None
    ) -> None:
        said = time.monotonic()
        while True:
            events = answer.progress(turn.prefill.take()) + answer.events(gained or ())
            # Not every event of the worker is news for the client.
            if not events and time.monotonic() - said >= self.settings.keepalive_seconds:
                events = answer.keep_alive
            if events:
                await response.write(events)
                said = time.monotonic()
            timing.note(gained or ())
            if turn.done:
                break
            gained = await turn.wait(max(said + self.settings.keepalive_seconds - time.monotonic(), 0))
        await response.write(answer.closing(turn))
        await response.write_eof()

    def _account(self, request: web.Request, turn: Turn, timing: _Timing) -> None:
        if timing.first is not None:
            self.metrics.ttft.labels(cache_report(turn)["outcome"]).observe(timing.first - timing.arrived)
            later = turn.completion_tokens - turn.choices
            if later > 0:
                self.metrics.tpot.observe((timing.last - timing.first) * turn.choices / later)
        _log.info(
            "request %s: outcome=%s; %d prompt tokens, %d new, first after %.3f s, all after %.3f s",
            request[REQUEST_ID],
            cache_line(turn),
            turn.prompt_tokens,
            turn.completion_tokens,
            (timing.first or timing.last) - timing.arrived,
            time.monotonic() - timing.arrived,
        )


async def _break_off(response: web.StreamResponse, last: bytes) -> None:
    """End a stream so that it cannot be taken for a whole answer."""
    response.force_close()
    with suppress(ConnectionError):
        await response.write(last)


class _Timing:
    """When a request came, and when its first and latest tokens went out; monotonic seconds."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.first: float | None = None
        self.last = arrived

    def note(self, gained: Sequence[Delta]) -> None:
        if gained:
            self.last = time.monotonic()
            self.first = self.first or self.last


def model_names(settings: GatewaySettings) -> tuple[str, ...]:
    """All names the model is listed under, the first one being its own."""
    base = Path(settings.model).name
    names = [*settings.served_model_name, settings.model, base, base.removesuffix(".gguf")]
    return tuple(dict.fromkeys(name for name in names if name))
