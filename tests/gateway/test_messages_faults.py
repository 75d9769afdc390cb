"""`/v1/messages` where something goes wrong: silence, lost workers and clients, failures and refusals."""

from __future__ import annotations

import asyncio
import json

import pytest
from anthropic_stream import broken_off, parse_events
from fake_worker import Call, FakeWorker, half_an_answer, never_ending, say
from served import QUESTION, Served, hang_up

from gateway.config import GatewaySettings
from protocol.messages import Cancel, Progress


class TestSilence:
    """Nothing to say for longer than the keep-alive time."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"keepalive_seconds": 0.05})

    @pytest.mark.parametrize("path", ["messages", "chat/completions"])
    async def test_there_is_a_sign_of_life_however_busy_the_worker_is(
        self, served: Served, worker: FakeWorker, path: str
    ):
        async def script(call: Call) -> None:
            await call.accept()
            computed = 0
            while not worker.cancelled.is_set():  # set by the test once it has seen enough
                computed += 1
                await call.send(Progress(worker.epoch, call.request.request_id, computed))
                await asyncio.sleep(0.01)
            await say("at last")(call)

        worker.script = script
        body = {"messages": QUESTION, "max_tokens": 50, "stream": True}
        response = await served.post(f"/v1/{path}", body)
        sign, end = {
            "messages": (b"event: ping", b"message_stop"),
            "chat/completions": (b": keep-alive", b"[DONE]"),
        }[path]
        signs = 0
        async with asyncio.timeout(20):
            while signs < 4:
                signs += sign in await response.content.readline()
        worker.cancelled.set()
        assert end in await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_cancels_in_the_worker(served: Served, worker: FakeWorker, stream: bool):
    worker.script = never_ending
    request = asyncio.create_task(served.message(stream=stream))
    await served.until(lambda: bool(worker.requests))
    await hang_up(request, stream)
    await served.until(lambda: bool(worker.cancels))
    assert worker.cancels == [Cancel(worker.requests[0].request_id, "disconnect", None)]
    await served.until(lambda: served.gateway._open == 0)


async def test_a_lost_worker_ends_the_stream_with_an_error_event(served: Served, worker: FakeWorker):
    worker.script = half_an_answer
    response = await served.message(stream=True)
    waiting = asyncio.create_task(served.message())
    await served.until(lambda: len(worker.requests) == 2)
    await worker.stop()
    error = broken_off(parse_events(await response.read()))
    assert error["error"]["type"] == "overloaded_error"
    assert error["request_id"] == worker.requests[0].request_id
    refused = await waiting
    assert refused.status == 503
    assert (await refused.json())["error"]["type"] == "overloaded_error"
    assert refused.headers["retry-after"]


async def test_a_request_that_fails_midway_ends_with_an_error_event(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await half_an_answer(call)
        await worker.cancelled.wait()  # set by the test once it has seen the headers
        await call.fail("internal")

    worker.script = script
    response = await served.message(stream=True)
    worker.cancelled.set()
    error = broken_off(parse_events(await response.read()))
    assert error["error"] == {"type": "api_error", "message": "told to fail"}


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("queue_full", 429, "rate_limit_error"),
        ("out_of_memory", 529, "overloaded_error"),
        ("loading", 503, "overloaded_error"),
        ("too_long", 400, "invalid_request_error"),
        ("internal", 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_have_their_own_status_and_type(
    served: Served, worker: FakeWorker, code: str, status: int, kind: str, stream: bool
):
    worker.script = lambda call: call.fail(code)
    response = await served.message(stream=stream)
    body = await response.json()
    assert response.status == status
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": "told to fail"},
        "request_id": response.headers["request-id"],
    }
    assert ("retry-after" in response.headers) is (status in (429, 503, 529))


async def test_other_refusals_have_the_same_shape(served: Served):
    url = served.url + "/v1/messages"
    for response, status, kind in (
        (await served.http.get(url), 405, "invalid_request_error"),
        (await served.http.get(url + "/batches"), 404, "not_found_error"),
        (await served.http.post(url, data=b"{"), 400, "invalid_request_error"),
        (await served.http.post(url, data=json.dumps([])), 400, "invalid_request_error"),
    ):
        body = await response.json()
        assert (response.status, body["type"], body["error"]["type"]) == (status, "error", kind)


class TestSmallBodies:
    """A limit on the body."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"max_body_bytes": 1000})

    async def test_a_body_over_the_limit_is_413(self, served: Served):
        response = await served.message(messages=[{"role": "user", "content": "x" * 2000}])
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "request_too_large"


class TestStrictModel:
    """Only listed names are served."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"strict_model": True})

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
    async def test_an_unknown_model_is_404(self, served: Served, path: str):
        body = {"messages": QUESTION, "max_tokens": 5, "model": "claude"}
        response = await served.post(path, body)
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"
