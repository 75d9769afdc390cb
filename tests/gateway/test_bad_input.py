"""What no client should send: each kind is refused with its exact words, in the dialect it was sent in."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import random
import threading
from typing import Any

import aiohttp
import pytest
from fake_worker import FakeWorker
from served import Served

from gateway.canonical import parse_arguments
from gateway.config import GatewaySettings
from gateway.tenants import ANYONE

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, PLAIN, RESPONSES, MESSAGES, COUNT)


async def raw_answer(served: Served, sent: bytes, *later: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of what comes back for bytes on a connection of their own."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    for each in later:
        await served.until(lambda: bool(served.gateway._receiving))
        writer.write(each)
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        ended = await reader.read()
    writer.close()
    assert ended == b"", "the connection is closed behind such an answer"
    return int(status.split()[1]), headers, json.loads(body)


NO_HTTP = [
    (b"nonsense\r\n\r\n", "invalid method"),
    (b"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", "Content-Length"),
    (b"POST {path} HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n", "header"),
    (b"POST {path} HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 10_000 + b"\r\n\r\n", "bytes"),
]


@pytest.mark.parametrize(("sent", "words"), NO_HTTP, ids=["line", "length", "header", "long"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_is_no_http_gets_the_dialects_error_an_id_and_one_log_line(
    served: Served, caplog: pytest.LogCaptureFixture, path: str, sent: bytes, words: str
):
    with caplog.at_level(logging.DEBUG):
        status, headers, body = await raw_answer(served, sent.replace(b"{path}", path.encode()))
    assert status == 400
    assert headers["content-type"].startswith("application/json")
    name = headers["x-request-id"]
    anthropic = path == MESSAGES and b"{path}" in sent
    assert ("request_id" in body) is anthropic
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("the request is no HTTP: ")
    assert words.lower() in body["error"]["message"].lower()
    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 1
    assert name in lines[0].getMessage()
    assert lines[0].exc_info is None
    assert "\n" not in lines[0].getMessage()
    metrics = await (await served.http.get(served.url + "/metrics")).text()
    assert 'prefixd_http_requests_total{route="other",status="400"} 1.0' in metrics


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_a_header_held_is_neither_logged_nor_sent_back(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
):
    secret = b"Authorization: Bearer sk-secret" + b"x" * 10_000
    status, _, body = await raw_answer(served, f"POST {path} HTTP/1.1\r\n".encode() + secret + b"\r\n\r\n")
    assert status == 400
    assert "sk-secret" not in json.dumps(body) + caplog.text


HALF = b"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"


class TestBodiesThatDoNotCome:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"body_seconds": 0.05})

    @pytest.mark.parametrize("path", PATHS)
    async def test_they_are_waited_for_so_long(self, served: Served, worker: FakeWorker, path: str):
        status, headers, body = await raw_answer(served, HALF.replace(b"{path}", path.encode()))
        assert status == 408
        assert headers["connection"] == "close"
        assert body["error"]["message"] == "the body did not arrive within 0.05 seconds"
        if path in (MESSAGES, COUNT):
            assert body["error"]["type"] == "timeout_error"
        else:
            assert body["error"]["code"] == "request_timeout"
        assert not worker.requests


PACKED = gzip.compress(json.dumps({"messages": []}).encode() + b" " * 5000 + random.Random(0).randbytes(5000))
CHUNKED, ZIPPED = b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n"
BROKEN = {
    "chunk length": (CHUNKED, [b"5\r\nhello\r\nnonsense\r\n"]),
    "chunk length later": (CHUNKED, [b"5\r\nhello\r\n", b"nonsense\r\n"]),
    "chunk end": (CHUNKED, [b"5\r\nhello", b"and more\r\n"]),
    "no gzip": (ZIPPED, [b"nonsense" * 10]),
    "no gzip later": (ZIPPED, [b"nonsense", b"nonsense" * 9]),
    "gzip broken inside": (ZIPPED, [PACKED[:2000] + b"nonsense" * 20 + PACKED[2160:]]),
    "gzip in broken chunks": (CHUNKED + ZIPPED, [b"8\r\nnonsense\r\n0\r\n\r\n"]),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_bodies_that_are_sent_wrong_are_refused_at_once(
    served: Served, worker: FakeWorker, caplog: pytest.LogCaptureFixture, path: str, kind: str
):
    header, pieces = BROKEN[kind]
    if CHUNKED not in header:
        header += b"Content-Length: %d\r\n" % sum(map(len, pieces))
    head = b"POST " + path.encode() + b" HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n"
    with caplog.at_level(logging.INFO):
        status, headers, body = await raw_answer(served, head, *pieces)
    assert status == 400
    assert body["error"]["message"].startswith("the body cannot be read: ")
    assert "nonsense" not in body["error"]["message"]
    assert ("request_id" in body) is (path == MESSAGES)
    assert body["error"]["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert headers["connection"] == "close"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]
    assert not worker.requests


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_stopping_does_not_wait_for_bodies(served: Served, path: str):
    waiting = asyncio.create_task(raw_answer(served, HALF.replace(b"{path}", path.encode())))
    await served.until(lambda: bool(served.gateway._receiving))
    await served.gateway.drain(asyncio.Event())
    status, _, body = await waiting
    assert status == 503
    assert body["error"]["message"] == "the server is shutting down"


USER = {"role": "user", "content": "hi"}


def chat(*messages: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), **fields}


def anthropic(*messages: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"messages": list(messages), "max_tokens": 9, **fields}


def responses(*items: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": list(items), **fields}


def say(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}


CALLS = {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
ASKED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
MISSING = "is missing: it must be a string or a list of parts"
UNCALLED = "is the result of a tool, but no message before it can have called one"
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
TEXT_ONLY = "this model takes text only"
EXACT = {
    "unknown role": (
        chat(say("hi", "robot")),
        "messages.0.role must be one of system, developer, user, assistant, tool, function",
    ),
    "unknown role, messages": (
        anthropic(say("hi", "developer")),
        "messages.0.role must be one of user, assistant, system",
    ),
    "unknown role, responses": (
        responses(say("hi", "tool")),
        "input.0.role must be one of system, developer, user, assistant",
    ),
    "image": (
        chat(say([{"type": "image_url", "image_url": {"url": "data:,"}}])),
        f"messages.0.content.0 has type 'image_url': {TEXT_ONLY}",
    ),
    "audio": (
        chat(say(["x", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])),
        f"messages.0.content.1 has type 'input_audio': {TEXT_ONLY}",
    ),
    "file": (chat(say([{"type": "file", "file": {}}])), f"messages.0.content.0 has type 'file': {TEXT_ONLY}"),
    "image, messages": (
        anthropic(say([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}])),
        "messages.0.content.0 has type 'image', which this model does not take here",
    ),
    "document, messages": (
        anthropic(say([{"type": "document", "source": PDF}])),
        "messages.0.content.0.source has type 'base64': this model takes text only, so send the document's text",
    ),
    "image, responses": (
        responses(say([{"type": "input_image", "image_url": "data:,"}])),
        f"input.0.content.0 has type 'input_image': {TEXT_ONLY}",
    ),
    "audio, responses": (
        responses(say([{"type": "input_audio", "input_audio": {}}])),
        f"input.0.content.0 has type 'input_audio': {TEXT_ONLY}",
    ),
    "result without a call": (
        chat(USER, {"role": "tool", "tool_call_id": "a", "content": "x"}),
        f"messages.1 {UNCALLED}",
    ),
    "result without a call, messages": (
        anthropic(say([{"type": "tool_result", "tool_use_id": "a", "content": "x"}])),
        f"messages.0 {UNCALLED}",
    ),
    "result without a call, responses": (
        responses(USER, {"type": "function_call_output", "call_id": "a", "output": "x"}),
        f"input.1 {UNCALLED}",
    ),
    "long name": (chat(USER, model="m" * 1025), "model: String should have at most 1024 characters"),
    "wrong type": (chat(USER, max_tokens="9"), "max_tokens: Input should be a valid integer"),
    "wrong type, messages": (anthropic(USER, stream="yes"), "stream: Input should be a valid boolean"),
    "wrong type, responses": (responses(USER, temperature=[]), "temperature: Input should be a valid number"),
    "no content": (chat(USER, {"role": "user"}), f"messages.1.content {MISSING}"),
    "no content, null": (chat(say(None, "system"), USER), f"messages.0.content {MISSING}"),
    "no content, of a result": (
        chat(USER, say(None, "assistant") | CALLS, {"role": "tool", "tool_call_id": "a"}),
        f"messages.2.content {MISSING}",
    ),
    "no content, of an answer": (
        chat(USER, {"role": "assistant", "tool_calls": [], "reasoning": " "}, USER),
        "messages.1.content is missing: only a message with tool_calls can do without",
    ),
    "no content, messages": (anthropic(say(None)), "messages.0.content must be a string or a list of blocks"),
    "no content, responses": (responses(USER, {"role": "assistant"}), f"input.1.content {MISSING}"),
    "no output": (
        responses(USER, ASKED, {"type": "function_call_output", "call_id": "a"}),
        f"input.2.output {MISSING}",
    ),
    "image in a result, messages": (
        anthropic(USER, say([USE], "assistant"), say([RESULT | {"content": [{"type": "image", "source": {}}]}])),
        f"messages.2.content.0.content.0 has type 'image': {TEXT_ONLY}",
    ),
    "old tools": (chat(USER, functions=[{"name": "f"}]), "functions is not supported: send them as tools"),
    "sound": (chat(USER, modalities=["text", "audio"]), "modalities.1: Input should be 'text'"),
    "no list": ((CHAT, {"messages": "hi"}), "messages must be a list"),
    "no text": ((RESPONSES, {"input": 5}), "input must be a string or a list of items"),
    "no prompt": ((PLAIN, {"prompt": {}}), "prompt must be text, a list of token ids, or a list of these"),
    "nothing to count": ((COUNT, {}), "messages must be a list"),
}


@pytest.mark.parametrize(("sent", "words"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_exact_words(
    served: Served, worker: FakeWorker, sent: tuple[str, dict[str, Any]], words: str, stream: bool
):
    path, body = sent
    response = await served.post(path, {"stream": stream, **body})
    told = await response.json()
    assert (response.status, told["error"]["message"]) == (400, words)
    assert told["error"]["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    assert not worker.requests


async def test_results_of_calls_and_answers_that_say_something_else_than_text_are_taken(served: Served):
    patched = {"type": "apply_patch_call_output", "call_id": "a", "status": "completed"}
    failed = {
        "type": "mcp_call",
        "id": "b",
        "name": "f",
        "arguments": "{}",
        "error": {"type": "x", "message": "no"},
    }
    for path, body in (
        chat(USER, {"role": "assistant", **CALLS}, {"role": "tool", "tool_call_id": "a", "content": "x"}),
        chat(USER, say(None, "assistant") | {"reasoning_content": "Hm."}, USER),
        chat(USER, say(None, "assistant") | {"refusal": "No."}, USER),
        anthropic(USER, say([USE], "assistant"), say([RESULT, {"type": "text", "text": "and"}])),
        responses(USER, ASKED, {"type": "function_call_output", "call_id": "a", "output": "x"}),
        responses(USER, ASKED, patched, failed),
    ):
        response = await served.post(path, body)
        assert response.status == 200, await response.text()


RAW = {
    "nothing": (b"", "the body is not JSON: "),
    "half": (b'{"messages": [', "the body is not JSON: "),
    "list": (b"[]", "the body must be a JSON object"),
    "utf-8": (b'{"messages": "\xff"}', "the body is not JSON: "),
    "half a utf-8": (b'{"messages": "\xe2\x82"}', "the body is not JSON: "),
    "utf-16": ('{"messages": []}'.encode("utf-16"), "the body is not JSON: "),
    "constant": (b'{"temperature": NaN}', "the body is not JSON: "),
    "brackets": (b"[" * 1_000_000, "the body is not JSON: "),
}


@pytest.mark.parametrize(("raw", "words"), RAW.values(), ids=RAW)
@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_are_no_json_objects(
    served: Served, worker: FakeWorker, path: str, raw: bytes, words: str
):
    response = await served.http.post(served.url + path, data=raw)
    error = (await response.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(words)
    assert not worker.requests


def nested(depth: int, key: str = "items", inner: object = None) -> object:
    value: object = inner or {}
    for _ in range(depth):
        value = {key: value}
    return value


NESTED = {
    "variables": lambda value: chat(USER, chat_template_kwargs={"x": value}),
    "tool": lambda value: chat(USER, tools=[{"type": "function", "function": {"name": "f", "parameters": value}}]),
    "forced": lambda value: chat(
        USER, tool_choice="required", tools=[{"type": "function", "function": {"name": "f", "parameters": value}}]
    ),
    "schema": lambda value: chat(USER, response_format={"type": "json_schema", "json_schema": {"schema": value}}),
    "arguments": lambda value: chat(
        USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
    ),
    "unknown": lambda value: chat(USER, unknown=value),
    "tool, messages": lambda value: anthropic(USER, tools=[{"name": "f", "input_schema": value}]),
    "use": lambda value: anthropic(
        USER, say([{"type": "tool_use", "id": "a", "name": "f", "input": value}], "assistant")
    ),
    "tool, responses": lambda value: responses(
        USER, tools=[{"type": "function", "name": "f", "parameters": value}]
    ),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("depth", [100, 128, 900])
async def test_deep_nesting_is_served_or_refused(served: Served, worker: FakeWorker, make: Any, depth: int):
    path, body = make(nested(depth))
    response = await served.post(path, body)
    told = await response.json()
    if depth > 100:
        assert (response.status, told["error"]["message"]) == (400, "the body is nested more than 128 deep")
    else:
        assert response.status in (200, 400), told
    assert bool(worker.requests) is (response.status == 200)


@pytest.mark.parametrize(("depth", "stays"), [(128, False), (129, True), (950, True), (100_000, True)])
def test_deep_arguments_in_a_string_stay_text(depth: int, stays: bool):
    text = "[" * depth + "]" * depth
    assert (parse_arguments(text, "arguments") == text) is stays


@pytest.mark.parametrize("arguments", ['{"t": "\\\\ud83d"}', '{"\\\\ud83d": [1]}'])
async def test_half_a_character_in_arguments_is_taken(served: Served, worker: FakeWorker, arguments: str):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments.replace("\\\\", "\\")}}
    messages = [say("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, say("r")]
    response = await served.post(CHAT, {"messages": messages})
    assert response.status == 200, await response.text()


async def post_large(served: Served, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    return await served.http.post(served.url + path, data=io.BytesIO(json.dumps(body).encode()))


MANY = 100_000
LARGE = 10 << 20


@pytest.mark.parametrize("make", [chat, anthropic, responses])
async def test_a_hundred_thousand_messages_are_too_long_and_hold_nobody_up(
    served: Served, worker: FakeWorker, make: Any
):
    large = asyncio.create_task(post_large(served, *make(*[USER] * MANY)))
    small = await served.chat()
    assert small.status == 200
    response = await large
    assert response.status == 400
    assert (await response.json())["error"]["message"].startswith("prompt is too long: at least ")
    assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [say("x" * LARGE)]}),
        (MESSAGES, {"messages": [say("x" * LARGE)], "max_tokens": 9}),
        (RESPONSES, {"input": "x" * LARGE}),
        (PLAIN, {"prompt": "x" * LARGE}),
    ],
    ids=["chat", "messages", "responses", "completions"],
)
async def test_ten_megabytes_of_text_are_too_long(
    served: Served, worker: FakeWorker, path: str, fields: dict[str, Any]
):
    response = await post_large(served, path, fields)
    assert response.status == 400
    assert (await response.json())["error"]["message"].startswith("prompt is too long: at least ")
    assert not worker.requests


@pytest.mark.parametrize(
    "sent",
    [
        chat(say("x", "r" * LARGE)),
        chat(say([{"type": "t" * LARGE}])),
        chat(USER, logit_bias={"t" * LARGE: 1}),
        chat(USER, model="m" * LARGE),
        anthropic(say([{"type": "t" * LARGE}])),
        responses({"type": "t" * LARGE}),
        responses(USER, tools=[{"type": "function", "name": "f" * LARGE, "parameters": 5}]),
    ],
    ids=["role", "part", "bias", "model", "block", "item", "tool"],
)
async def test_a_refusal_does_not_send_back_all_it_was_sent(served: Served, sent: tuple[str, dict[str, Any]]):
    response = await post_large(served, *sent)
    assert response.status == 400
    assert len(await response.read()) < 4000


async def test_large_bodies_wait_for_one_another_and_small_ones_for_none(served: Served):
    release = threading.Event()
    gateway, medium, large = served.gateway, b" " * (1 << 20), b" " * (2 << 20)
    held = [asyncio.create_task(gateway.work_on(large, ANYONE, release.wait)) for _ in range(4)]
    try:
        assert await gateway.work_on(medium, ANYONE, lambda: "read") == "read"
        assert (await served.chat()).status == 200
        assert not any(task.done() for task in held)
    finally:
        release.set()
    assert await asyncio.gather(*held) == [True] * 4
