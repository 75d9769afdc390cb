"""Requests of many messages or megabytes: refused with few words, and nobody waits for them."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from typing import Any

import aiohttp
import pytest
from fake_worker import FakeWorker
from request_bodies import CHAT, MESSAGES, PLAIN, RESPONSES, USER, anthropic, chat, responses, say
from served import Served

from gateway.tenants import ANYONE


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
