"""Clients that hang up, many at once, servers that stop, and what they say of themselves meanwhile."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from fake_worker import Call, FakeWorker, never_ending, say, silent
from served import Served, hang_up, lines

from gateway.config import GatewaySettings
from gateway.openai_answers import ChatAnswer
from protocol.messages import Cancel


@pytest.mark.parametrize("script", [never_ending, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels_in_the_worker(served: Served, worker: FakeWorker, stream: bool, script):
    worker.script = script
    request = asyncio.create_task(served.chat(stream=stream))
    await served.until(lambda: bool(worker.requests))
    await hang_up(request, stream)
    await served.until(lambda: bool(worker.cancels))
    assert worker.cancels == [Cancel(worker.requests[0].request_id, "disconnect", None)]
    await served.until(lambda: served.gateway._open == 0)


@pytest.mark.parametrize("phase", ["starting", "loading", "hung", "stopping", "failed"])
async def test_ready_says_the_phase(served: Served, worker: FakeWorker, phase: str):
    worker.phase = phase
    await served.until(lambda: served.gateway.client.why_not_ready() is not None)
    response = await served.http.get(served.url + "/ready")
    assert response.status == 503
    assert (await response.json())["phase"] == phase
    assert (await served.chat()).status == 503


async def test_stopping_lets_open_requests_end_and_refuses_new_ones(served: Served, worker: FakeWorker):
    release = asyncio.Event()

    async def script(call: Call) -> None:
        await release.wait()
        await say("finished all the same")(call)

    worker.script = script
    waiting = asyncio.create_task(served.chat())
    await served.until(lambda: bool(worker.requests))
    draining = asyncio.create_task(served.gateway.drain(asyncio.Event()))
    await served.until(lambda: served.gateway.stopping)
    assert (await served.chat()).status == 503
    assert (await served.http.get(served.url + "/ready")).status == 503
    release.set()
    body = await (await waiting).json()
    assert body["choices"][0]["message"]["content"] == "finished all the same"
    await draining


async def test_past_the_grace_period_open_requests_end_with_an_error(
    served: Served, worker: FakeWorker, settings: GatewaySettings
):
    worker.script = never_ending
    response = await served.chat(stream=True)
    hurry = asyncio.Event()
    draining = asyncio.create_task(served.gateway.drain(hurry))
    await served.until(lambda: served.gateway.stopping)
    hurry.set()
    got = await lines(response)
    assert "shutting down" in json.loads(got[-1].removeprefix("data: "))["error"]["message"]
    await draining
    await served.until(lambda: bool(worker.cancels))
    assert worker.cancels[0].cause == "shutdown"


async def test_two_open_requests_never_share_an_id(served: Served, worker: FakeWorker):
    worker.script = silent
    body = {"messages": [{"role": "user", "content": "hi"}]}
    both = [
        asyncio.create_task(served.post("/v1/chat/completions", body, **{"x-request-id": "same"}))
        for _ in range(2)
    ]
    await served.until(lambda: len(worker.requests) == 2)
    names = {request.request_id for request in worker.requests}
    assert len(names) == 2
    assert all(name.startswith("same") for name in names)
    for task in both:
        task.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    await served.until(lambda: not served.gateway.client._open)


async def test_metrics_hold_both_processes_and_survive_a_missing_worker(served: Served, worker: FakeWorker):
    await served.chat()
    text = await (await served.http.get(served.url + "/metrics")).text()
    assert 'prefixd_http_requests_total{route="chat",status="200"} 1.0' in text
    assert 'prefixd_ttft_seconds_count{outcome="miss"} 1.0' in text
    assert 'prefixd_ttft_seconds_count{outcome="hit"} 0.0' in text
    assert "prefixd_worker_up 1.0" in text
    assert "prefixd_gateway_open_requests 0.0" in text
    assert "prefixd_slots 4.0" in text
    await worker.stop()
    await served.until(lambda: served.gateway.client.heartbeat is None)
    text = await (await served.http.get(served.url + "/metrics")).text()
    assert "prefixd_worker_up 0.0" in text
    assert "prefixd_slots" not in text


async def test_models_and_root(served: Served, settings: GatewaySettings):
    listed = await (await served.http.get(served.url + "/v1/models")).json()
    names = [entry["id"] for entry in listed["data"]]
    assert names == [settings.model, "tiny"]
    for name in names:
        one = await served.http.get(f"{served.url}/v1/models/{name.replace('/', '%2F')}")
        assert (await one.json())["id"] == name
    assert (await served.http.get(served.url + "/v1/models/other")).status == 404
    assert (await served.http.head(served.url + "/")).status == 200
    assert (await served.http.get(served.url + "/")).status == 200


async def test_many_streams_lose_nothing(served: Served, worker: FakeWorker):
    """Far more messages than a socket holds at its default high-water mark."""
    worker.script = say("word " * 120)

    async def one(number: int) -> str:
        response = await served.chat(str(number), stream=True)
        text = ""
        for line in await lines(response):
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    text += choice["delta"].get("content", "")
        return text

    texts = await asyncio.gather(*(one(number) for number in range(24)))
    assert texts == ["word " * 120] * 24


async def test_large_prompts_hold_up_neither_streams_nor_health(served: Served, worker: FakeWorker):
    """K-LO7: a megabyte each, which takes its time to be rendered, encoded and hashed."""
    worker.model = replace(worker.model, max_model_len=1 << 20)
    await served.until(lambda: served.gateway.client.model() == worker.model)
    worker.script = never_ending
    stream = await served.chat(stream=True)
    worker.script = say("Read.")
    # No word comes twice: known ones would take no time.
    texts = (" ".join(f"{number}w{index}" for index in range(120_000)) for number in range(2))
    large = [asyncio.create_task(served.chat(text)) for text in texts]
    rounds = 0
    while not all(task.done() for task in large):
        assert (await served.http.get(served.url + "/health")).status == 200
        assert await stream.content.readline()
        rounds += 1
    assert rounds >= 25, "they went on between the prompts at best"
    assert [(await task).status for task in large] == [200] * 2
    stream.close()
    await served.until(lambda: bool(worker.cancels))


async def test_our_own_fault_in_a_stream_is_an_event_too(
    served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: ChatAnswer, turn: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(ChatAnswer, "closing", broken)
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    got = await lines(response)
    assert json.loads(got[-1].removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_a_second_try_with_the_same_id_gets_another(served: Served, worker: FakeWorker):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(2):
        await served.post("/v1/chat/completions", body, **{"x-request-id": "again"})
    assert worker.requests[0].request_id == "again"
    assert worker.requests[1].request_id.startswith("again-")
