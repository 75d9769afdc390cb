"""Requests in three dialects, whole and streamed, and what their clients saw of how they ended."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

HUNG_SECONDS = 120.0  # without a byte
_QUESTION = "Write a very long story about a ship and its crew. Do not stop before everybody is home."


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the APIs. `fields` make an answer of a given length."""

    name: str
    path: str
    fields: Callable[[int], dict[str, Any]]


def _messages(tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": tokens}


DIALECTS = (
    Dialect("chat", "/v1/chat/completions", lambda tokens: {**_messages(tokens), "ignore_eos": True}),
    Dialect("messages", "/v1/messages", _messages),
    Dialect("responses", "/v1/responses", lambda tokens: {"input": _QUESTION, "max_output_tokens": tokens}),
)


@dataclass(slots=True)
class Seen:
    """One request: how it ended in its client's eyes, and when it began and ended (monotonic)."""

    dialect: str
    streamed: bool
    end: str = ""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    events: int = 0  # of a stream, so far


def ask(url: str, dialect: Dialect, seen: Seen, tokens: int) -> Seen:
    """Ask and wait for the end, whatever it is."""
    try:
        seen.end = _asked(url, dialect, seen, tokens)
    except TimeoutError:
        seen.end = f"hung for {HUNG_SECONDS:g} s"
    except ConnectionRefusedError:
        seen.end = "connection refused"
    except (ConnectionError, http.client.HTTPException):
        seen.end = "connection closed"
    seen.ended = time.monotonic()
    return seen


def _asked(url: str, dialect: Dialect, seen: Seen, tokens: int) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=HUNG_SECONDS)
    try:
        body = json.dumps({"temperature": 0, "stream": seen.streamed, **dialect.fields(tokens)}).encode()
        connection.request("POST", dialect.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status == 200 and seen.streamed:
            return stream_end(response, seen)
        return whole_end(response.status, response.read())
    finally:
        connection.close()


def whole_end(status: int, body: bytes) -> str:
    """How an answer that is no stream ended."""
    told = json.loads(body)
    if status == 200:
        return "whole answer"
    return f"{status} `{told['error']['type']}`: {told['error']['message']}"


def stream_end(lines: Iterable[bytes], seen: Seen) -> str:
    """How a stream ended: the first event that says so decides."""
    for event in _events(lines):
        seen.events += 1
        if end := event_end(event):
            return end
    return "stream broken off"


def event_end(event: Any) -> str:
    """What an event says of the end of its stream; nothing where it goes on."""
    match event:
        case "[DONE]" | {"type": "message_stop" | "response.completed" | "response.incomplete"}:
            return "whole answer"
        case {"error": {"type": str(kind), "message": str(words)}}:
            return f"error event `{kind}`: {words}"
        case {"type": "error", "code": code, "message": str(words)}:
            return f"error event `{code}`: {words}"
        case {"type": "response.failed"}:
            return "response.failed"
    return ""


def _events(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        text = line.decode().strip()
        if text == "data: [DONE]":
            yield "[DONE]"
        elif text.startswith("data: "):
            yield json.loads(text[6:])
