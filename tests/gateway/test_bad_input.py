"""What no client should send: each kind is refused with its exact words, in the dialect it was sent in."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from fake_worker import FakeWorker
from served import Served

from gateway.config import GatewaySettings

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, PLAIN, RESPONSES, MESSAGES, COUNT)


async def raw_answer(served: Served, sent: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of what comes back for bytes on a connection of their own."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
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


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_stopping_does_not_wait_for_bodies(served: Served, path: str):
    waiting = asyncio.create_task(raw_answer(served, HALF.replace(b"{path}", path.encode())))
    await served.until(lambda: bool(served.gateway._receiving))
    await served.gateway.drain(asyncio.Event())
    status, _, body = await waiting
    assert status == 503
    assert body["error"]["message"] == "the server is shutting down"
