"""`/v1/responses` over real sockets: answers, streams, errors, and the same token ids as for a chat."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from fake_worker import Call, FakeWorker, half_an_answer, ids_of, never_ending, say
from responses_grammar import check_response, check_stream, read_events, text_of
from served import Served

from gateway.config import GatewaySettings
from protocol.messages import Cancel

QUESTION = "What is the capital of France?"


async def ask(served: Served, value: object = QUESTION, **fields: object) -> aiohttp.ClientResponse:
    return await served.post("/v1/responses", {"input": value, **fields})


async def read(response: aiohttp.ClientResponse) -> tuple[list[dict[str, Any]], list[str]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events((await response.text()).split("\n"))


async def test_a_whole_answer_has_text_usage_and_cache_header(served: Served, worker: FakeWorker):
    worker.script = say("Paris.", outcome="hit", depth=6, reason="none", kept=9)
    response = await ask(served)
    body = await response.json()
    assert response.status == 200
    assert response.headers["x-prefixd-cache"] == "hit; depth=6; reason=none"
    assert check_response(body).output_text == "Paris."
    assert body["status"] == "completed"
    prompt, new = len(worker.requests[0].token_ids), len(ids_of("Paris.")) + 1
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 3},
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + new,
    }
    assert body["prefixd"]["outcome"] == "hit"


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_a_stream_says_what_a_whole_answer_and_a_chat_say(served: Served, worker: FakeWorker, at_once: int):
    text = "größe 日本語 😀👨‍👩‍👧\u0085 done"
    worker.script = say(text, at_once=at_once, outcome="partial", depth=3, reason="diverged")
    whole = await (await ask(served)).json()
    response = await ask(served, stream=True)
    final = check_stream((await read(response))[0])
    assert response.headers["x-prefixd-cache"] == "partial; depth=3; reason=diverged"
    chat = await (await served.chat(QUESTION)).json()
    assert text_of(final["output"][0]) == text_of(whole["output"][0]) == text
    assert chat["choices"][0]["message"]["content"] == text
    assert final["usage"] == whole["usage"]
    assert final["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert final["prefixd"] == whole["prefixd"] == chat["prefixd"]


async def test_the_same_conversation_has_the_same_ids_as_a_chat(served: Served, worker: FakeWorker):
    part = {"type": "input_text", "text": QUESTION}
    items = [
        {"type": "message", "id": "msg_9", "role": "developer", "content": [part]},
        {"type": "message", "role": "user", "content": [part]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " Paris. "}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "run", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"role": "user", "content": "Go on."},
    ]
    tool = {"name": "run", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}
    await ask(served, items, instructions="Be brief.", tools=[{"type": "function", **tool}])
    function = {"name": "run", "arguments": '{ "a": 1 }'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": QUESTION},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "Paris.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "user", "content": "Go on."},
    ]
    await served.chat(messages=messages, tools=[{"type": "function", "function": tool}])
    one, other = worker.requests
    assert one.token_ids == other.token_ids
    assert one.boundaries == other.boundaries
    assert one.sampling == other.sampling


async def test_sampling_follows_the_request(served: Served, worker: FakeWorker):
    fields = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 2, "top_k": 5, "seed": 3}
    body = await (await ask(served, **fields)).json()
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 2)
    assert (sampling.top_k, sampling.seed, sampling.logprobs) == (5, 3, None)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    final = check_stream((await read(await ask(served, stream=True, **fields)))[0])
    assert final["status"] == "incomplete"
    assert final["output"][0]["status"] == "incomplete"


async def test_log_probabilities_come_where_they_are_asked_for(served: Served, worker: FakeWorker):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    final = check_stream((await read(await ask(served, stream=True, **fields)))[0])
    told = final["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in told] == [2] * len(ids_of("Hello there!"))
    final = check_stream((await read(await ask(served, stream=True)))[0])
    assert final["output"][0]["content"][0]["logprobs"] == []


async def test_what_was_said_is_absorbed_as_it_will_be_sent_back(served: Served, worker: FakeWorker):
    body = await (await ask(served)).json()
    await served.until(lambda: bool(worker.absorbed))
    history = [{"role": "user", "content": QUESTION}, *body["output"], {"role": "user", "content": "Go on."}]
    await ask(served, history)
    end = worker.absorbed[0].boundaries[-1].end
    assert worker.absorbed[0].boundaries[-1].messages == 2
    assert worker.requests[1].token_ids[:end] == worker.absorbed[0].token_ids


async def test_reasoning_and_calls_are_items_and_come_back_as_absorbed(served: Served, worker: FakeWorker):
    worker.script = say('<think>Hm.</think>Look.\n<tool_call>{"name": "run", "arguments": {"a": [1]}}</tool_call>')
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "name": "run"}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
    }
    whole = await (await ask(served, **fields)).json()
    final = check_stream((await read(await ask(served, stream=True, **fields)))[0])
    shapes = [(item["type"], text_of(item)) for item in final["output"]]
    assert shapes == [(item["type"], text_of(item)) for item in whole["output"]]
    assert [kind for kind, _ in shapes] == ["reasoning", "message", "function_call"]
    assert [text for _, text in shapes] == ["Hm.", "Look.", '{"a": [1]}']
    counts = final["usage"]["output_tokens_details"]["reasoning_tokens"], len(ids_of("<think>Hm."))
    assert counts[0] == counts[1] < final["usage"]["output_tokens"]
    await served.until(lambda: len(worker.absorbed) == 2)
    call_id = final["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "ok"}
    await ask(served, [{"role": "user", "content": QUESTION}, *final["output"], result], **fields)
    absorbed = worker.absorbed[1].token_ids
    assert worker.requests[2].token_ids[: len(absorbed)] == absorbed


async def test_an_empty_answer(served: Served, worker: FakeWorker):
    worker.script = say("")
    final = check_stream((await read(await ask(served, stream=True)))[0])
    assert [text_of(item) for item in final["output"]] == [""]
    assert check_response(await (await ask(served)).json()).output_text == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_names_the_field(
    served: Served, worker: FakeWorker, fields: dict[str, Any], param: str, stream: bool
):
    response = await ask(served, **({"value": fields["input"]} if "input" in fields else fields), stream=stream)
    error = (await response.json())["error"]
    assert response.status == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not worker.requests


async def test_a_prompt_that_is_too_long_is_refused_with_counts(served: Served, worker: FakeWorker):
    response = await ask(served, "word " * 2000, stream=True)
    error = (await response.json())["error"]
    assert response.status == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert str(worker.model.max_model_len) in error["message"]
    assert not worker.requests


async def test_hanging_up_cancels_in_the_worker(served: Served, worker: FakeWorker):
    worker.script = never_ending
    (await ask(served, stream=True)).close()
    await served.until(lambda: bool(worker.cancels))
    assert worker.cancels == [Cancel(worker.requests[0].request_id, "disconnect", None)]
    await served.until(lambda: served.gateway._open == 0)


async def test_a_lost_worker_fails_the_response(served: Served, worker: FakeWorker):
    worker.script = half_an_answer
    response = await ask(served, stream=True)
    waiting = asyncio.create_task(ask(served))
    await served.until(lambda: len(worker.requests) == 2)
    await worker.stop()
    final = check_stream((await read(response))[0])
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert text_of(final["output"][0])
    assert (await waiting).status == 503


async def test_a_failure_before_the_first_byte_has_its_status(served: Served, worker: FakeWorker):
    worker.script = lambda call: call.fail("queue_full")
    response = await ask(served, stream=True)
    assert response.status == 429
    assert response.headers["retry-after"] == "1"
    assert (await response.json())["error"]["code"] == "overloaded"


class TestWhileQueued:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"keepalive_seconds": 0.01})

    async def test_a_silent_stream_is_kept_alive(self, served: Served, worker: FakeWorker):
        go = asyncio.Event()

        async def waits(call: Call) -> None:
            await go.wait()
            await say("At last.")(call)

        worker.script = waits
        response = await ask(served, stream=True)
        started = await response.content.readuntil(b": keep-alive\n\n")
        go.set()
        rest = (await response.read()).decode()
        got, comments = read_events((started.decode() + rest).split("\n"))
        assert "keep-alive" in comments
        assert text_of(check_stream(got)["output"][0]) == "At last."


async def test_the_official_client_understands_it(served: Served, worker: FakeWorker):
    worker.script = say("Paris it is.", outcome="hit", depth=3, reason="none")
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        whole = await client.responses.create(model="tiny", input=QUESTION, store=False)
        assert whole.output_text == "Paris it is."
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 3
        events = [
            event async for event in await client.responses.create(model="tiny", input=QUESTION, stream=True)
        ]
        assert events[-1].type == "response.completed"
        assert events[-1].response.usage == whole.usage
        async with client.responses.stream(model="tiny", input=QUESTION) as stream:
            said = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert said == final.output_text == whole.output_text
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        worker.script = lambda call: call.fail("queue_full")
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="tiny", input="hi", stream=True)
