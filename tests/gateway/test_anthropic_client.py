"""The official client understands what is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from fake_worker import Call, FakeWorker, ids_of, say
from line_parser import LineParser
from served import Served

from gateway.reply import ReplyReader

MESSAGES = [{"role": "user", "content": "Where?"}]
TOOLS = [{"name": "lookup", "description": "Looks.", "input_schema": {"type": "object"}}]


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="x", max_retries=0) as client:
        yield client


async def test_messages_whole_and_streamed(client: anthropic.AsyncAnthropic, worker: FakeWorker):
    worker.script = say("Paris it is.", outcome="hit", depth=3, reason="none")
    whole = await client.messages.create(model="tiny", max_tokens=50, messages=MESSAGES, system="Be brief.")
    assert whole.content[0].text == "Paris it is."
    assert (whole.stop_reason, whole.usage.cache_read_input_tokens) == ("end_turn", 3)
    assert whole._request_id == worker.requests[0].request_id
    asked = {"model": "tiny", "max_tokens": 50, "messages": MESSAGES, "system": "Be brief."}
    async with client.messages.stream(**asked) as stream:
        said = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert said == "Paris it is."
    assert final.content[0].text == said
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = await client.messages.create(**asked, stream=True)
    assert [event.type async for event in raw][-1] == "message_stop"
    beta = await client.beta.messages.create(**asked, betas=["context-1m-2025-08-07"])
    assert beta.content[0].text == said
    counted = await client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + 3


async def test_thinking_and_tools(
    client: anthropic.AsyncAnthropic, served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served.gateway.readers, "reader", lambda *_, **__: ReplyReader(LineParser))
    worker.script = say('think hard\ncall lookup {"where": ["here", {"deep": true}]}\ncall lookup {}')
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES, "tools": TOOLS}
    whole = await client.messages.create(**asked, thinking={"type": "adaptive"})
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert {"thinking", "signature", "input_json"} <= set(kinds)
    assert final.content == whole.content
    assert [block.type for block in final.content] == ["thinking", "tool_use", "tool_use"]
    assert final.content[1].input == {"where": ["here", {"deep": True}]}
    assert final.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "nothing"} for block in final.content[1:]
    ]
    asked["messages"] = [
        *MESSAGES,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": results},
    ]
    worker.script = say("Nowhere.")
    assert (await client.messages.create(**asked)).content[0].text == "Nowhere."


async def test_models(client: anthropic.AsyncAnthropic):
    names = [model.id async for model in await client.models.list()]
    model = await client.models.retrieve(names[-1])
    assert (names[-1], model.max_input_tokens) == ("tiny", 512)
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("none")


async def test_errors(client: anthropic.AsyncAnthropic, worker: FakeWorker):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="tiny", max_tokens=5, messages=[])
    assert refused.value.body["error"]["message"] == "messages must not be empty"
    assert refused.value.request_id == refused.value.body["request_id"]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
    for code, kind in (
        ("queue_full", anthropic.RateLimitError),
        ("out_of_memory", anthropic.InternalServerError),
        ("internal", anthropic.InternalServerError),
    ):
        worker.script = lambda call, code=code: call.fail(code)
        with pytest.raises(kind):
            await client.messages.create(**asked)
        with pytest.raises(kind):
            await client.messages.create(**asked, stream=True)


async def test_a_stream_that_breaks_off_raises(client: anthropic.AsyncAnthropic, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(ids_of("half an ans"))
        await worker.cancelled.wait()  # set by the test once it has seen the headers
        await call.fail("internal")

    worker.script = script
    async with client.messages.stream(model="tiny", max_tokens=5, messages=MESSAGES) as stream:
        worker.cancelled.set()
        with pytest.raises(anthropic.APIStatusError) as broken:
            await stream.get_final_message()
    assert broken.value.body["error"]["type"] == "api_error"
