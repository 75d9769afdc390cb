"""A client of any OpenAI-compatible chat endpoint that times what it streams."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

# No answer within this time: the server hangs.
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=600)


class ServerFailed(Exception):
    """A server refused a request or broke off an answer. The message names it and its reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are seconds since the request was sent; None stands for what was not told."""

    text: str
    first_seconds: float  # to the first content
    last_seconds: float  # to the finish reason: last tokens may be invisible
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    outcome: str
    reason: str
    worker_seconds: float | None = None  # of the first token's time, what a prefixd says its worker took
    sent: float = 0.0  # by the clock of this process
    arrivals: tuple[float, ...] = ()  # of each piece of content, since it was sent


async def chat(
    session: aiohttp.ClientSession, base_url: str, model: str, messages: list[dict[str, str]], **options: Any
) -> Answer:
    """Stream one greedy answer. An answer without any content counts as beginning with its end."""
    asked = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    body = json.dumps(asked).encode()  # of no server's time
    headers = {"content-type": "application/json"}
    sent = time.perf_counter()
    first: float | None = None
    last = 0.0
    arrivals: list[float] = []
    text = ""
    usage: dict[str, Any] = {}
    told: dict[str, Any] = {}
    async with session.post(f"{base_url}/v1/chat/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise ServerFailed(f"{base_url} answers {response.status}: {await response.text()}")
        cache = parse_cache_header(response.headers.get("x-prefixd-cache", ""))
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerFailed(f"{base_url} fails: {event['error']}")
            usage = event.get("usage") or usage
            told = event.get("prefixd") or told
            for choice in event["choices"]:
                now = time.perf_counter() - sent
                if piece := choice["delta"].get("content"):
                    first = now if first is None else first
                    arrivals.append(now)
                    text += piece
                if choice.get("finish_reason"):
                    last = now
    details = usage.get("prompt_tokens_details") or {}
    cache |= {name: str(value) for name, value in told.items()}
    return Answer(
        text=text,
        first_seconds=last if first is None else first,
        last_seconds=last,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens"),
        outcome=cache.get("outcome", "-"),
        reason=cache.get("reason", "-"),
        worker_seconds=told["queue_seconds"] + told["prefill_seconds"] if "prefill_seconds" in told else None,
        sent=sent,
        arrivals=tuple(arrivals),
    )


def parse_cache_header(header: str) -> dict[str, str]:
    """The fields of `x-prefixd-cache: OUTCOME; depth=N; reason=R`."""
    outcome, *rest = [part.strip() for part in header.split(";")]
    fields = dict(part.split("=", 1) for part in rest if "=" in part)
    return {"outcome": outcome, **fields} if outcome else {}


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The name of the first model that the server lists."""
    async with session.get(f"{base_url}/v1/models") as response:
        response.raise_for_status()
        name: str = (await response.json())["data"][0]["id"]
        return name
