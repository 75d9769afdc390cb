"""Bytes that are no request, and bodies that are sent wrong or do not come: refused in the dialect of their path."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import random
from typing import Any

import pytest
from fake_worker import FakeWorker
from request_bodies import CHAT, COUNT, MESSAGES, PATHS
from served import Served

from gateway.config import GatewaySettings


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


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(served: Served):
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    size = served.gateway.settings.max_body_bytes + 1
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        assert b" 413 " in await reader.readline()
        assert b"request_too_large" in await reader.readuntil(b"}}")
    writer.close()


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
