"""A running gateway and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from gateway.service import Gateway

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Served:
    """A running gateway and a client of it."""

    gateway: Gateway
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object, **headers: str) -> aiohttp.ClientResponse:
        return await self.http.post(self.url + path, json=body, headers=headers)

    async def chat(self, content: str = "hi", **fields: object) -> aiohttp.ClientResponse:
        fields.setdefault("messages", [{"role": "user", "content": content}])
        return await self.post("/v1/chat/completions", fields)

    async def message(self, **fields: object) -> aiohttp.ClientResponse:
        return await self.post("/v1/messages", {"messages": QUESTION, "max_tokens": 100, **fields})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that comes about by messages."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (nothing to wait on)
                await asyncio.sleep(0.005)

    async def ready(self) -> None:
        await self.until(lambda: self.gateway.client.why_not_ready() is None)


async def lines(response: aiohttp.ClientResponse) -> list[str]:
    """All of a stream but its empty lines."""
    return [line.decode().strip() async for line in response.content if line.strip()]


async def hang_up(request: asyncio.Task[aiohttp.ClientResponse], stream: bool) -> None:
    """A stream once it has begun, any other request without an answer."""
    if stream:
        (await request).close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
