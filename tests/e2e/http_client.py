"""A plain HTTP client of the OpenAI dialect: it shows headers, raw events and errors, and can hang up."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 120.0  # of one socket operation
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@dataclass(frozen=True)
class Answer:
    """A whole answer, or the error in its place."""

    status: int
    headers: dict[str, str]  # names in lower case
    raw: bytes

    @cached_property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """With text, log-probabilities and finish reasons: equal for equal answers."""
        assert self.status == 200, self.raw
        return self.body["choices"]

    @property
    def text(self) -> str:
        return choice_text(self.choices[0])

    @property
    def usage(self) -> dict[str, Any]:
        return self.body["usage"]

    @property
    def prompt_tokens(self) -> int:
        return self.usage["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def outcome(self) -> tuple[str, int, str]:
        return cache_header(self.headers)


class Stream:
    """An answer that comes as events. Closing it hangs up."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.comments: list[str] = []
        self.is_done = False  # by `[DONE]`
        self._events = self._read()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._events

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take_text(self, pieces: int) -> list[dict[str, Any]]:
        """The next events, up to and with so many that carry text."""
        taken = []
        for event in self:
            taken.append(event)
            pieces -= any(choice_text(choice) for choice in event.get("choices", ()))
            if not pieces:
                break
        return taken

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in iter(self._response.readline, b""):
            text = line.decode().rstrip("\n")
            if text.startswith(":"):
                self.comments.append(text[1:].strip())
            elif text == "data: [DONE]":
                self.is_done = True
            elif text.startswith("data: "):
                yield json.loads(text[6:])
            else:
                assert not text, f"no such line in an event stream: {text}"


class Client:
    """Talks to one daemon; usable from several threads."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._host = urlsplit(url).netloc

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Bytes are sent as they are, anything else as JSON."""
        connection, response = self._open(method, path, body, headers)
        try:
            return Answer(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())
        finally:
            response.close()
            connection.close()

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        """A greedy answer of 12 tokens, unless fields say otherwise."""
        return self.request("POST", "/v1/chat/completions", {**GREEDY, "messages": messages, **fields})

    def cold(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        """The reference: the same request without the cache."""
        return self.chat(messages, cache_prompt=False, **fields)

    def complete(self, prompt: object, **fields: Any) -> Answer:
        return self.request("POST", "/v1/completions", {**GREEDY, "prompt": prompt, **fields})

    def stream(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> Stream:
        """Returns once the headers are here."""
        body = {**GREEDY, "messages": messages, "stream": True, **fields}
        return Stream(*self._open("POST", "/v1/chat/completions", body, headers))

    def stream_completion(self, prompt: object, **fields: Any) -> Stream:
        body = {**GREEDY, "prompt": prompt, "stream": True, **fields}
        return Stream(*self._open("POST", "/v1/completions", body, None))

    def follow(self, path: str, headers: dict[str, str]) -> Stream:
        """The events at a path."""
        return Stream(*self._open("GET", path, None, headers))

    def send(self, messages: list[dict[str, Any]], **fields: Any) -> http.client.HTTPConnection:
        """Send a request and read nothing: closing the connection hangs up, `getresponse` waits."""
        connection = http.client.HTTPConnection(self._host, timeout=TIMEOUT_SECONDS)
        body = json.dumps({**GREEDY, "messages": messages, **fields}).encode()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection

    def _open(
        self, method: str, path: str, body: object, headers: dict[str, str] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, timeout=TIMEOUT_SECONDS)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def choice_text(choice: dict[str, Any]) -> str:
    """The text of a choice of a chat or completion, whole or a piece of a stream."""
    inner = choice.get("message") or choice.get("delta") or choice
    return inner.get("content") or inner.get("text") or ""


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice in all events of a stream."""
    choices = [choice for event in events for choice in event.get("choices", ()) if choice["index"] == index]
    return "".join(choice_text(choice) for choice in choices)


def cache_header(headers: dict[str, str]) -> tuple[str, int, str]:
    """Outcome, depth and reason of `x-prefixd-cache`."""
    outcome, depth, reason = headers["x-prefixd-cache"].split("; ")
    return outcome, int(depth.removeprefix("depth=")), reason.removeprefix("reason=")


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """An answer as part of a history, as the gateway takes it: without blanks around it, which clients trim."""
    return {"role": "assistant", "content": text.strip()}


def tool_step(text: str, result: str, number: int) -> list[dict[str, Any]]:
    """An answer that calls a tool, as `assistant`, and what came of it."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {**assistant(text), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
    ]
