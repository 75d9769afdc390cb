"""What a client may send, and how long it may take: beyond that it is refused or cut off, and holds nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_worker import Call, FakeWorker, ids_of
from served import Served

from gateway.body import MAX_ITEMS
from gateway.config import GatewaySettings
from gateway.slow_clients import TimedConnection

DEADLINE_SECONDS = 30
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}


@pytest.fixture
def settings(model_dir: Path, short_run_dir: Path) -> GatewaySettings:
    return GatewaySettings(model=str(model_dir), run_dir=short_run_dir, header_seconds=0.3, unread_seconds=0.3)


class Raw:
    """A connection on which a test sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def is_cut(self) -> bool:
        """Wait for the end. True if nothing came before it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await self.reader.read() == b""

    async def answer(self) -> int:
        """The status of the next answer, its body read."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            [length] = [int(line.split(":")[1]) for line in head.splitlines() if "content-length" in line.lower()]
            await self.reader.readexactly(length)
        return int(head.split()[1])


@pytest.fixture
async def connect(served: Served):
    opened: list[Raw] = []
    target = urlsplit(served.url)

    async def connect(sent: bytes = b"") -> Raw:
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        opened.append(Raw(reader, writer))
        writer.write(sent)
        await writer.drain()
        return opened[-1]

    yield connect
    for raw in opened:
        raw.writer.close()


def request(body: bytes, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"])
async def test_headers_that_do_not_end_are_not_waited_for(served: Served, connect, sent: bytes):
    assert await (await connect(sent)).is_cut()
    counted = 'prefixd_http_requests_total{route="other",status="408"} 1.0'
    assert counted in served.gateway.metrics.exposition().decode()


async def test_headers_that_do_not_end_after_another_request_are_not_waited_for_either(connect):
    raw = await connect(request(json.dumps(CHAT).encode()))
    assert await raw.answer() == 200
    raw.writer.write(b"POST /v1/chat/comp")
    assert await raw.is_cut()


async def test_between_requests_a_connection_may_rest(connect):
    raw = await connect(request(json.dumps(CHAT).encode()))
    assert await raw.answer() == 200
    assert await (await connect()).is_cut()  # and so that much time has passed
    raw.writer.write(request(json.dumps(CHAT).encode()))
    assert await raw.answer() == 200


async def test_a_body_has_a_time_of_its_own(connect):
    sent = request(json.dumps(CHAT).encode())
    raw = await connect(sent[:-5])
    assert await (await connect()).is_cut()
    raw.writer.write(sent[-5:])
    assert await raw.answer() == 200


async def test_a_client_that_reads_nothing_holds_nothing(
    served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    made = TimedConnection.connection_made

    def narrow(self: TimedConnection, transport: asyncio.BaseTransport) -> None:
        """Of what is not read the system holds only a little."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(TimedConnection, "connection_made", narrow)

    async def endless(call: Call) -> None:
        await call.accept()
        ids = ids_of("The quick brown fox jumps over the lazy dog. " * 200)
        while not worker.cancelled.is_set():
            await call.tokens(ids)
            await asyncio.sleep(0.001)
        await call.finish(reason="cancelled")
        await call.complete()

    worker.script = endless
    target = urlsplit(served.url)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((target.hostname, target.port))
    try:
        deaf.sendall(request(json.dumps(CHAT | {"stream": True}).encode()))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await worker.cancelled.wait()
    finally:
        deaf.close()
    assert [cancel.cause for cancel in worker.cancels] == ["disconnect"]
    await served.until(lambda: "prefixd_gateway_open_requests 0.0" in served.gateway.metrics.exposition().decode())


@pytest.mark.parametrize(
    "headers",
    [["X-Many: 1"] * 200, ["X-Long: " + "a" * 20_000], ["X" * 20_000 + ": name"]],
    ids=["many", "long", "long name"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_too_many_or_too_long_headers_are_refused(connect, worker: FakeWorker, path, headers):
    raw = await connect(request(b"{}", path, *headers))
    assert await raw.answer() == 400
    assert await raw.is_cut()
    assert not worker.requests


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
        ("/v1/chat/completions", "tools"),
        ("/v1/messages", "tools"),
        ("/v1/responses", "tools"),
    ],
)
async def test_more_items_than_anybody_sends_are_refused(served: Served, path: str, field: str):
    count = MAX_ITEMS[field] + 1
    fields = {"messages": CHAT["messages"], "input": "hi", "max_tokens": 1, field: [{}] * count}
    response = await served.post(path, fields)
    told = await response.json()
    assert response.status == 400
    assert told["error"]["message"] == f"{field} holds {count} items, and at most {MAX_ITEMS[field]} are taken"
