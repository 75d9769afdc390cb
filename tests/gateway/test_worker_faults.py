"""Workers that die, come back, fall silent, fail or talk nonsense: what their clients are told."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_worker import Call, FakeWorker, half_an_answer, ids_of, never_ending, say, silent
from served import Served, lines

from gateway.worker_client import SILENT_BEATS
from protocol.messages import PROTOCOL_VERSION, Cancel, Phase


async def test_a_lost_worker_ends_streams_with_an_error(served: Served, worker: FakeWorker):
    worker.script = half_an_answer
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
    await served.until(lambda: lost == [2])
    assert f"the worker is {phase} while it served this request" in await response.text()
    assert (await whole).status == 503
    await served.until(lambda: len(worker.cancels) == 2)
    worker.phase, worker.script = "ready", say("Hello there!")
    await served.ready()
    assert (await served.chat()).status == 200


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
