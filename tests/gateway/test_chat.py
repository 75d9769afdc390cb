"""`/v1/chat/completions` over real sockets: answers, streams, parameters and what they use."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from fake_worker import Call, FakeWorker, ids_of, say
from served import Served


async def events(response: aiohttp.ClientResponse) -> tuple[list[dict[str, Any]], list[str]]:
    """The data objects of a stream and its other lines; checks that it ends with [DONE]."""
    data, comments = [], []
    lines = [line for line in (await response.text()).split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        if line.startswith("data: "):
            data.append(json.loads(line.removeprefix("data: ")))
        else:
            comments.append(line)
    return data, comments


def joined(data: list[dict[str, Any]], choice: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for e in data for c in e["choices"] if c["index"] == choice)


async def test_a_whole_answer_has_text_usage_and_cache_header(served: Served, worker: FakeWorker):
    worker.script = say("Paris.", outcome="hit", depth=6, reason="none", kept=9)
    response = await served.chat("What is the capital of France?")
    body = await response.json()
    assert response.status == 200
    assert response.headers["x-prefixd-cache"] == "hit; depth=6; reason=none"
    assert response.headers["x-request-id"] == worker.requests[0].request_id
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris."}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len(worker.requests[0].token_ids)
    assert body["usage"]["completion_tokens"] == len(ids_of("Paris.")) + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6, "cache_write_tokens": 0}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert body["prefixd"]["diverged_message"] == 1


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_a_stream_says_what_a_whole_answer_says(served: Served, worker: FakeWorker, at_once: int):
    text = "größe 日本語 😀👨‍👩‍👧 done"
    worker.script = say(text, at_once=at_once)
    whole = await (await served.chat()).json()
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    data, _ = await events(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-prefixd-cache"] == "miss; depth=0; reason=cold"
    assert data[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(data) == whole["choices"][0]["message"]["content"] == text
    assert [c["finish_reason"] for e in data for c in e["choices"] if c["finish_reason"]] == ["stop"]
    assert data[-1]["choices"] == []
    assert data[-1]["usage"] == whole["usage"]
    assert data[-1]["prefixd"]["outcome"] == "miss"


async def test_without_usage_a_comment_tells_the_outcome(served: Served, worker: FakeWorker):
    data, comments = await events(await served.chat(stream=True))
    assert comments == [": prefixd outcome=miss; depth=0; reason=cold"]
    assert all("usage" not in event for event in data)


async def test_headers_do_not_wait_for_a_slow_lookup(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await worker.cancelled.wait()  # set by the test once it has seen the headers
        await say("late")(call)

    worker.script = script
    response = await served.chat(stream=True)
    assert "x-prefixd-cache" not in response.headers
    worker.cancelled.set()
    data, comments = await events(response)
    assert joined(data) == "late"
    assert comments[-1].startswith(": prefixd outcome=miss")


async def test_every_choice_gets_its_own_text(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await call.accept()
        for part in ("one ", "two "):
            for choice in range(call.request.n):
                await call.tokens(ids_of(f"{part}{choice} "), choice)
        for choice in range(call.request.n):
            await call.finish(choice, "length" if choice else "stop")
        await call.complete()

    worker.script = script
    body = await (await served.chat(n=3)).json()
    assert [c["message"]["content"] for c in body["choices"]] == [f"one {i} two {i} " for i in range(3)]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length", "length"]
    data, _ = await events(await served.chat(n=3, stream=True))
    assert [joined(data, i) for i in range(3)] == [f"one {i} two {i} " for i in range(3)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 50])
async def test_a_stop_string_ends_the_text_before_it(
    served: Served, worker: FakeWorker, stream: bool, at_once: int
):
    async def script(call: Call) -> None:
        await call.accept()
        ids = ids_of("Hello there, wonderful world of stops")
        for at in range(0, len(ids), at_once):
            await call.tokens(ids[at : at + at_once])
        await worker.cancelled.wait()
        await call.finish()
        await call.complete()

    worker.script = script
    response = await served.chat(stop=["wonderful w", "never", "rld"], stream=stream)
    if stream:
        data, _ = await events(response)
        text, reasons = joined(data), [c["finish_reason"] for e in data for c in e["choices"]]
    else:
        body = await response.json()
        text, reasons = body["choices"][0]["message"]["content"], [body["choices"][0]["finish_reason"]]
    assert text == "Hello there, "
    assert [reason for reason in reasons if reason] == ["stop"]
    cancel = worker.cancels[0]
    assert (cancel.cause, cancel.choice) == ("stop", 0)


async def test_text_held_back_for_a_stop_string_comes_in_the_end(served: Served, worker: FakeWorker):
    worker.script = say("it ends with wonder")
    data, _ = await events(await served.chat(stop="wonderful", stream=True))
    assert joined(data) == "it ends with wonder"


async def test_logprobs_carry_tokens_bytes_and_alternatives(served: Served, worker: FakeWorker):
    worker.script = say("Hello 😀")
    body = await (await served.chat(logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "Hello 😀"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in content)
    data, _ = await events(await served.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [t for e in data for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert streamed == content


async def test_logprobs_stop_with_the_text(served: Served, worker: FakeWorker):
    worker.script = say("Hello there world", at_once=50)
    body = await (await served.chat(logprobs=True, stop="there")).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode().startswith("Hello")
    assert not any("world" in entry["token"] for entry in content)


async def test_parameters_reach_the_worker(served: Served, worker: FakeWorker):
    await served.chat(
        temperature=0,
        top_p=0.5,
        top_k=7.0,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
        seed=42,
        max_completion_tokens=9,
        n=2,
        cache_prompt=False,
        unknown_field={"x": 1},
        user=None,
    )
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, {5: -100.0})
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (42, 9, None)
    assert set(sampling.stop_token_ids) == {0, 2}
    assert (worker.requests[0].n, worker.requests[0].cache_prompt) == (2, False)


async def test_ignore_eos_sends_no_end_tokens(served: Served, worker: FakeWorker):
    await served.chat(ignore_eos=True, max_tokens=3)
    assert worker.requests[0].sampling.stop_token_ids == ()


async def test_more_tokens_than_fit_are_clamped_and_end_with_length(served: Served, worker: FakeWorker):
    worker.script = say("word " * 600)
    body = await (await served.chat(max_tokens=100_000)).json()
    prompt = len(worker.requests[0].token_ids)
    assert worker.requests[0].sampling.max_tokens == worker.model.max_model_len - prompt
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == worker.model.max_model_len


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fills_the_context_is_refused_with_counts(
    served: Served, worker: FakeWorker, stream: bool
):
    response = await served.chat("word and " * 600, stream=stream)
    error = (await response.json())["error"]
    assert response.status == 400
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert not worker.requests


async def test_a_last_assistant_message_is_continued(served: Served, worker: FakeWorker):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is "}]
    await served.chat(messages=messages)
    request = worker.requests[0]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is "
    assert list(request.token_ids) == ids_of(text)
    assert request.boundaries[-1].messages == 1


async def test_a_keep_alive_line_fills_silence(served: Served, worker: FakeWorker):
    object.__setattr__(served.gateway.settings, "keepalive_seconds", 0.01)

    async def script(call: Call) -> None:
        await call.accept()
        await worker.cancelled.wait()
        await call.finish()
        await call.complete()

    worker.script = script
    response = await served.chat(stream=True)
    async for line in response.content:
        if line == b": keep-alive\n":
            worker.cancelled.set()
    assert worker.cancelled.is_set()
