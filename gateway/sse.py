"""Server-sent events: with and without a name, comment lines, and one that keeps a silent connection alive."""

from __future__ import annotations

from typing import Any

import orjson

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def data(value: Any) -> bytes:
    """One event. JSON has no raw line breaks, so one line is enough."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One event with a name, for clients that listen by name."""
    return b"event: " + name.encode() + b"\n" + data(value)


def comment(text: str) -> bytes:
    """A line that clients skip. The text must be one line."""
    return b": " + text.encode() + b"\n\n"
