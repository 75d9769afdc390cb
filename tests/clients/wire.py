"""What a client and a daemon say to each other: a proxy between them that keeps a record."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

_ANSWERING = ("/v1/messages", "/v1/responses", "/v1/chat/completions", "/v1/completions")
_HOP_BY_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}
# With these a stream of each dialect begins to answer: its first text, thought or call.
_ANSWER_BEGINS = re.compile(
    rb'content_block_start|response\.output_item\.added|"(reasoning_)?content":"[^"]|"tool_calls":\[|"text":"[^"]'
)
_LAST = (b"data: [DONE]", b"event: response.completed", b"event: message_stop")


class Usage(NamedTuple):
    """Tokens of one answer; `prompt` includes `cached`."""

    prompt: int
    cached: int
    output: int


@dataclass(eq=False)
class Exchange:
    """One request and its answer, as far as it came."""

    method: str
    path: str
    query: str
    request_headers: dict[str, str]
    sent: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    received: bytes = b""
    first_seconds: float | None = None  # from the request to the first token
    ended: bool = False
    cut: bool = False  # by `Wire.cut_next`

    @property
    def is_answer(self) -> bool:
        """Whether the worker was asked for tokens."""
        return self.method == "POST" and self.path in _ANSWERING

    @property
    def is_whole(self) -> bool:
        """The answer came to its end; some clients hang up as soon as they have read it."""
        return self.ended or any(last in self.received for last in _LAST)

    @property
    def has_tools(self) -> bool:
        """Whether it is of the agent's own conversation: titles and the like are asked for without tools."""
        return self.is_answer and bool(self.body.get("tools"))

    @property
    def body(self) -> Any:
        return json.loads(self.sent)

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, or the whole answer as the only one."""
        text = self.received.decode()
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            return [json.loads(text)]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def errors(self) -> list[dict[str, Any]]:
        """Events that tell of an error, in any dialect."""
        kinds = ("error", "response.failed", "response.incomplete")
        return [event for event in self.events() if event.get("error") or event.get("type") in kinds]

    def usage(self) -> Usage | None:
        """What the client was told last; None if it did not ask."""
        told = [usage for event in self.events() if (usage := _usage_of(event))]
        return told[-1] if told else None


class Wire:
    """The proxy. It listens from construction to `close`, on a thread of its own."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        self.cut_next = False  # break the connection of an agent's next answer off, once it has begun
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url, self._stop = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def answers(self) -> list[Exchange]:
        """Requests for tokens so far, in order."""
        return [exchange for exchange in self.exchanges if exchange.is_answer]

    async def _start(self) -> tuple[str, Any]:
        session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._pass_on(session, request)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [address] = runner.addresses

        async def stop() -> None:
            await runner.cleanup()
            await session.close()

        return f"http://127.0.0.1:{address[1]}", stop

    async def _pass_on(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        sent, headers = await request.read(), _end_to_end(request.headers.items())
        exchange = Exchange(request.method, request.path, request.query_string, headers, sent)
        self.exchanges.append(exchange)
        began = time.monotonic()
        url = self._upstream + request.path_qs
        async with session.request(request.method, url, data=sent, headers=headers) as answer:
            exchange.status = answer.status
            exchange.headers = {name.lower(): value for name, value in answer.headers.items()}
            response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers.items()))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                exchange.received += chunk
                if exchange.first_seconds is None and _ANSWER_BEGINS.search(exchange.received):
                    exchange.first_seconds = time.monotonic() - began
                await response.write(chunk)
                if self.cut_next and exchange.has_tools and exchange.first_seconds is not None:
                    self.cut_next, exchange.cut = False, True
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            exchange.ended = True
            await response.write_eof()
            return response


def _end_to_end(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _HOP_BY_HOP}


def _usage_of(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage") or event.get("response", {}).get("usage")
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return Usage(prompt, cached, usage["output_tokens"])
    if "prompt_tokens" in usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Usage(usage["input_tokens"], cached, usage["output_tokens"])
