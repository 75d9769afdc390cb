"""Clients that hang up, workers that die, and servers that stop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from fake_worker import Call, FakeWorker, ids_of, say
from served import Served

from gateway.config import GatewaySettings
from gateway.openai_answers import ChatAnswer
from gateway.worker_client import SILENT_BEATS
from protocol.messages import PROTOCOL_VERSION, Cancel, Phase


async def never_ending(call: Call) -> None:
    await call.accept()
    while not call.worker.cancelled.is_set():
        await call.tokens(ids_of("on and on "))
        await asyncio.sleep(0.01)


async def silent(call: Call) -> None:
    await call.worker.cancelled.wait()


async def lines(response: aiohttp.ClientResponse) -> list[str]:
    return [line.decode().strip() async for line in response.content if line.strip()]


@pytest.mark.parametrize("script", [never_ending, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels_in_the_worker(served: Served, worker: FakeWorker, stream: bool, script):
    worker.script = script
    request = asyncio.create_task(served.chat(stream=stream))
    await served.until(lambda: bool(worker.requests))
    if stream:
        response = await request
        response.close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await served.until(lambda: bool(worker.cancels))
    assert worker.cancels == [Cancel(worker.requests[0].request_id, "disconnect", None)]
    await served.until(lambda: served.gateway._open == 0)


async def test_a_lost_worker_ends_streams_with_an_error(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(ids_of("half an ans"))

    worker.script = script
    response = await served.chat(stream=True)
    waiting = asyncio.create_task(served.chat())
    await served.until(lambda: len(worker.requests) == 2)
    await worker.stop()
    got = await lines(response)
    last = json.loads(got[-1].removeprefix("data: "))
    assert last["error"]["code"] == "worker_unavailable"
    assert "data: [DONE]" not in got
    assert (await waiting).status == 503
    ready = await served.http.get(served.url + "/ready")
    assert ready.status == 503
    assert (await served.http.get(served.url + "/health")).status == 200
    assert (await served.chat()).status == 503


async def test_requests_of_an_older_epoch_end_and_newer_ones_are_served(served: Served, worker: FakeWorker):
    worker.script = silent
    waiting = asyncio.create_task(served.chat())
    await served.until(lambda: bool(worker.requests))
    worker.epoch = "epoch-2"
    assert (await waiting).status == 503
    await served.until(lambda: bool(worker.cancels))
    worker.script = say("back again")
    body = await (await served.chat()).json()
    assert body["choices"][0]["message"]["content"] == "back again"


async def test_events_of_an_older_epoch_are_dropped(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(ids_of("true"))
        worker.epoch, now = "epoch-0", worker.epoch
        await call.tokens(ids_of("false"))
        worker.epoch = now
        await call.finish()
        await call.complete()

    worker.script = script
    body = await (await served.chat()).json()
    assert body["choices"][0]["message"]["content"] == "true"


async def test_a_worker_that_comes_back_is_found(served: Served, worker: FakeWorker):
    await worker.stop()
    await served.until(lambda: served.gateway.client.heartbeat is None)
    worker.epoch = "epoch-2"
    await worker.start()
    await served.ready()
    assert (await served.chat()).status == 200


async def test_a_worker_that_loads_may_be_silent_for_long_but_not_for_ever(
    served: Served, worker: FakeWorker, caplog: pytest.LogCaptureFixture
):
    """What it imports and compiles keeps all its threads from speaking."""
    client = served.gateway.client
    worker.phase = "loading"
    await served.until(lambda: client.heartbeat is not None and client.heartbeat.phase == "loading")
    await worker.stop()
    await served.until(lambda: client._silent_beats > 2 * SILENT_BEATS)
    answer = await served.http.get(served.url + "/ready")
    assert (answer.status, (await answer.json())["phase"]) == (503, "loading")
    assert not [line for line in caplog.messages if "silent" in line]
    await served.until(lambda: client.heartbeat is None)
    assert [line for line in caplog.messages if "silent" in line]


async def test_a_worker_may_be_silent_while_it_takes_the_vocabulary_in(served: Served, worker: FakeWorker):
    """What it makes of that for its first grammar keeps all its threads from speaking as well."""
    client = served.gateway.client
    worker.script = silent
    asking = asyncio.create_task(served.chat(response_format={"type": "json_object"}))
    await served.until(lambda: worker.requests)
    await worker.stop()
    await served.until(lambda: client._silent_beats > 2 * SILENT_BEATS)
    assert client.heartbeat is not None
    assert (await asking).status == 503  # in the end
    assert client.heartbeat is None


async def test_a_worker_of_another_version_is_refused_by_name(served: Served, worker: FakeWorker, caplog):
    """What was open when one side was upgraded ends, and a worker of our version is served again."""
    worker.script = never_ending
    response = await served.chat(stream=True)
    worker.version, ours = PROTOCOL_VERSION + 1, worker.version
    assert "worker_unavailable" in await response.text()
    said = f"protocol version {PROTOCOL_VERSION + 1} is not {ours}: upgrade both sides"
    answer = await served.http.get(served.url + "/ready")
    assert answer.status == 503
    assert said in (await answer.json())["detail"]
    refused = await served.chat()
    assert refused.status == 503
    assert said in (await refused.json())["error"]["message"]
    seen = served.gateway.client.bad_frames
    await served.until(lambda: served.gateway.client.bad_frames > seen + SILENT_BEATS)  # it goes on saying so
    assert said in str(served.gateway.client.why_not_ready())
    assert sum(line.startswith("the worker and this gateway") for line in caplog.messages) == 1, "said once"
    worker.version, worker.script = ours, say("Hello there!")
    await served.ready()
    assert (await served.chat()).status == 200


async def test_a_stalled_gateway_does_not_blame_the_worker(served: Served, worker: FakeWorker):
    client = served.gateway.client
    lost: list[int] = []
    client.on_lost = lost.append
    worker.script = silent
    waiting = asyncio.create_task(served.chat())
    await served.until(lambda: bool(worker.requests))
    client._silent_beats = SILENT_BEATS - 2  # as if the last beats had found the loop busy
    await served.until(lambda: client._silent_beats <= 1)
    assert not lost
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await served.until(lambda: not client._open)


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("invalid", 400, False),
        ("too_long", 400, False),
        ("queue_full", 429, True),
        ("out_of_memory", 503, True),
        ("internal", 500, False),
        ("stopping", 503, True),
        ("loading", 503, True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_status(
    served: Served, worker: FakeWorker, code: str, status: int, retry: bool, stream: bool
):
    worker.script = lambda call: call.fail(code)
    response = await served.chat(stream=stream)
    assert response.status == status
    assert ("Retry-After" in response.headers) is retry
    assert "told to fail" in (await response.json())["error"]["message"]


async def test_a_failure_in_a_stream_is_an_event(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(ids_of("some text"))
        await asyncio.sleep(0)
        await worker.cancelled.wait()
        await call.fail("internal")

    worker.script = script
    response = await served.chat(stream=True)
    first = await response.content.readline()
    assert first.startswith(b"data: ")
    worker.cancelled.set()
    got = await lines(response)
    assert json.loads(got[-1].removeprefix("data: "))["error"]["message"] == "told to fail"


async def test_a_completion_without_its_finish_is_no_success(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        await call.complete()

    worker.script = script
    assert (await served.chat()).status == 503


@pytest.mark.parametrize("phase", ["hung", "failed"])
async def test_what_is_open_ends_when_the_worker_says_that_it_hangs(
    served: Served, worker: FakeWorker, phase: Phase
):
    """It may come back: then it finds them cancelled, and is asked again."""
    lost: list[int] = []
    served.gateway.client.on_lost = lost.append
    worker.script = never_ending
    response = await served.chat(stream=True)
    worker.script = silent
    whole = asyncio.create_task(served.chat())
    await served.until(lambda: len(worker.requests) == 2)
    worker.phase = phase
    assert f"the worker is {phase} while it served this request" in await response.text()
    assert (await whole).status == 503
    await served.until(lambda: len(worker.cancels) == 2)
    assert lost == [2]
    worker.phase, worker.script = "ready", say("Hello there!")
    await served.ready()
    assert (await served.chat()).status == 200


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


async def test_nonsense_from_the_worker_is_counted_and_dropped(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        for frames in ([b"nonsense"], [b"{}", b"x"], [b'{"v":1,"type":"Tokens","body":{}}'], [b""]):
            await worker._work.send_multipart([call.peer, *frames])
        await call.send(Cancel("x", "stop"))  # well formed, but not a worker's to send
        await say("unharmed")(call)

    worker.script = script
    body = await (await served.chat()).json()
    assert body["choices"][0]["message"]["content"] == "unharmed"
    assert served.gateway.client.bad_frames == 5


async def test_a_choice_nobody_asked_for_is_our_fault(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        call.counts.append(0)
        await call.tokens(ids_of("x"), choice=1)

    worker.script = script
    assert (await served.chat()).status == 500


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
    large = [asyncio.create_task(served.chat(f"{number} words " * 100_000)) for number in range(2)]
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
