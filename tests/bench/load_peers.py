"""The two ends that a gateway under load is measured between.

    load_peers.py worker RUN_DIR     a worker without a model, over the real sockets and messages
    load_peers.py bare PORT          an HTTP handler that streams the same chunks, with nothing behind it

Both send one token at once and then one each `INTERVAL_SECONDS`. A token's text is the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import time
from array import array
from pathlib import Path

import orjson
import zmq
from aiohttp import web
from tokenizers import Tokenizer

from protocol.codec import decode, encode
from protocol.messages import (
    Accepted,
    Completed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Tokens,
)
from protocol.rundir import WORK_SOCKET, prepare_run_dir, socket_address

INTERVAL_SECONDS = 0.2
TICKS, TICKS_A_SECOND = 50_000, 10_000  # so a time comes again after 5 s
FIRST_TICK_ID = 1000  # behind the vocabulary that the prompts are made of
MODEL = ModelInfo("load", "llama", "float32", "cpu", FIRST_TICK_ID + TICKS, 4096, 1, 1, 1, 4, True)


def tick() -> int:
    """The time, which all processes of a machine share."""
    return int(time.monotonic() * TICKS_A_SECOND) % TICKS


def tick_text(ticks: int) -> str:
    return f"~{ticks:05d}"


def add_ticks(tokenizer: Tokenizer) -> Tokenizer:
    """The same with a token for each time. No text is encoded as one: there are no merges to them."""
    description = json.loads(tokenizer.to_str())
    assert tokenizer.get_vocab_size() <= FIRST_TICK_ID
    description["model"]["vocab"] |= {tick_text(number): FIRST_TICK_ID + number for number in range(TICKS)}
    return Tokenizer.from_str(json.dumps(description))


class Worker:
    """Answers every request with as many tokens as it asks for."""

    def __init__(self, run_dir: Path) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(socket_address(run_dir, WORK_SOCKET))
        self._due: list[tuple[float, int, bytes, Generate, int]] = []
        self._count = 0

    def run(self) -> None:
        while True:
            wait = 1000 if not self._due else max(0, int((self._due[0][0] - time.monotonic()) * 1000))
            if self._socket.poll(wait):
                self._take()
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, peer, request, number = heapq.heappop(self._due)
                self._send_token(peer, request, number)

    def _take(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        match decode(frames):
            case Hello():
                self._send(peer, Heartbeat("load", "ready", "", 0.0, 0, 0, MODEL))
            case Generate() as request:
                self._send(peer, Accepted("load", request.request_id, "hit", 0, "none"))
                self._send_token(peer, request, 0)

    def _send_token(self, peer: bytes, request: Generate, number: int) -> None:
        name, total = request.request_id, request.sampling.max_tokens
        self._send(peer, Tokens("load", name, 0, array("i", [FIRST_TICK_ID + tick()])))
        if number + 1 < total:
            self._count += 1
            heapq.heappush(
                self._due, (time.monotonic() + INTERVAL_SECONDS, self._count, peer, request, number + 1)
            )
            return
        self._send(peer, Finished("load", name, 0, "length", total))
        prompt = len(request.token_ids)
        self._send(peer, Completed("load", name, "hit", 0, "none", prompt, total, 0.0, 0.0, 0.0))

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, *encode(message)])


def _chunk(text: str) -> bytes:
    """An event such as a gateway's."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    head = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion.chunk", "created": 1_700_000_000}
    return b"data: " + orjson.dumps({**head, "model": "load", "choices": [choice]}) + b"\n\n"


async def _answer(request: web.Request) -> web.StreamResponse:
    body = orjson.loads(await request.read())
    if not body.get("stream"):
        return web.Response(body=_chunk(tick_text(tick()))[6:], content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for number in range(body["max_tokens"]):
        await asyncio.sleep(INTERVAL_SECONDS if number else 0)
        await response.write(_chunk(tick_text(tick())))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _ready(request: web.Request) -> web.Response:
    return web.Response()


def bare(port: int) -> None:
    import uvloop

    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    app.router.add_get("/ready", _ready)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        print=None,
        access_log=None,
        shutdown_timeout=0.1,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    kind, argument = sys.argv[1:]
    if kind == "worker":
        prepare_run_dir(Path(argument))
        Worker(Path(argument)).run()
    else:
        bare(int(argument))
