"""The Responses dialect of a real daemon, through its official client and on the wire."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from chat_model import words
from conftest import Served
from daemon import Daemon, metrics, until
from http_client import Client, assistant, cache_header, system, user
from reference import Reference
from responses_grammar import check_response, check_stream, read_events, text_of

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
ENDLESS: dict[str, Any] = {"max_output_tokens": 15_000, "ignore_eos": True}
COMPUTED, DEVICE = (f"prefixd_cache_tokens_total{{source={source}}}" for source in ("computed", "device"))
TOOL = {"type": "function", "name": "look", "description": words("tool", 60), "parameters": {"type": "object"}}


@pytest.fixture
def official(served: Served) -> Iterator[openai.OpenAI]:
    url = served.client.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=120) as client:
        yield client


def ask(client: Client, value: Any, **fields: Any) -> dict[str, Any]:
    """A response whose shape has been checked."""
    answer = client.request("POST", "/v1/responses", {**GREEDY, "input": value, **fields})
    assert answer.status == 200, answer.raw
    check_response(answer.body)
    return answer.body


def ask_stream(client: Client, value: Any, **fields: Any) -> dict[str, Any]:
    """The response at the end of a stream whose grammar has been checked."""
    answer = client.request("POST", "/v1/responses", {**GREEDY, "input": value, "stream": True, **fields})
    return check_stream(read_events(answer.raw.decode().split("\n"))[0])


def said(response: dict[str, Any]) -> str:
    return "".join(text_of(item) for item in response["output"] if item["type"] == "message")


def test_later_turns_hit_and_every_account_of_them_agrees(served: Served, official: openai.OpenAI):
    head, items = words("response head", 200), []
    for turn in range(3):
        items.append({"role": "user", "content": [{"type": "input_text", "text": words(f"response {turn}", 150)}]})
        before = metrics(served.client)
        raw = official.responses.with_raw_response.create(**GREEDY, instructions=head, input=items)
        response = raw.parse()
        after = metrics(served.client)
        outcome, depth, reason = cache_header(dict(raw.headers))
        assert (outcome == "hit") is (turn > 0)
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens == depth == after[DEVICE] - before[DEVICE]
        assert usage.input_tokens - depth == after[COMPUTED] - before[COMPUTED]
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        if turn:
            assert depth > 0.5 * usage.input_tokens
        explained = json.loads(served.daemon.cachectl("--json", "explain", raw.headers["x-request-id"]).stdout)
        assert (explained["outcome"], explained["depth"], explained["reason"]) == (outcome, depth, reason)
        assert explained["prompt_tokens"] == usage.input_tokens
        assert explained["completion_tokens"] == usage.output_tokens
        # As clients keep a history: whole items, with the ids that they came with.
        items += [item.to_dict() for item in response.output]


def test_both_dialects_share_prompts_answers_and_snapshots(served: Served):
    told = system(words("response told", 80))
    history = [user(words("response question", 120)), assistant("An answer."), user("And then?")]
    for fields in ({}, {"temperature": 0.8, "seed": 3}):
        chat = served.client.chat([told, *history], **fields)
        response = ask(served.client, history, instructions=told["content"], **fields)
        assert said(response) == chat.text
        assert response["usage"]["input_tokens"] == chat.prompt_tokens
        assert response["usage"]["output_tokens"] == chat.usage["completion_tokens"]
        assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0.9 * chat.prompt_tokens - 30
        assert response["prefixd"]["outcome"] == "hit"


def test_a_stream_ends_with_the_whole_response(served: Served, official: openai.OpenAI):
    text = words("response stream", 90)
    whole = ask(served.client, text)
    cold = ask_stream(served.client, text, cache_prompt=False)
    warm = ask_stream(served.client, text)
    for streamed in (cold, warm):
        assert said(streamed) == said(whole)
        assert streamed["status"] == whole["status"] == "incomplete"
        assert streamed["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cold["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["input_tokens_details"]["cached_tokens"] > 0
    stop = said(whole)[-4:]
    with official.responses.stream(
        model="tiny", input=text, temperature=0, max_output_tokens=12, extra_body={"stop": stop}
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == said(whole)[: said(whole).index(stop)]
    assert final.status == "completed"


def test_an_answer_that_was_begun_goes_on(served: Served):
    begun = [user("Say something."), {"role": "assistant", "content": "The river "}]
    response, chat = ask(served.client, begun), served.client.chat(begun)
    assert said(response) == chat.text
    assert response["usage"]["input_tokens"] == chat.prompt_tokens


def test_a_history_of_tools_is_reused(served: Served, official: openai.OpenAI):
    fields = {**GREEDY, "tools": [TOOL, {"type": "web_search"}], "tool_choice": "auto"}
    items: list[dict[str, Any]] = [user(words("response tools", 80))]
    first = official.responses.create(**fields, input=items)
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{n}",
            "call_id": f"c{n}",
            "name": "look",
            "arguments": f'{{"at":{n}}}',
        }
        for n in range(2)
    ]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": words(call["id"], 30)}
        for call in calls
    ]
    items += [{"role": "assistant", "content": "Let me see."}, *calls, *results]
    second = official.responses.create(**fields, input=items)
    assert second.usage.input_tokens_details.cached_tokens > 0.5 * first.usage.input_tokens
    items += [*(item.to_dict() for item in second.output), user("So?")]
    third = official.responses.create(**fields, input=items)
    assert third.usage.input_tokens_details.cached_tokens > 0.9 * second.usage.input_tokens - 30


def test_what_a_client_sends_back_was_absorbed(start: Callable[..., Daemon], reference: Reference):
    daemon = start("--absorb")
    client = daemon.wait_ready()
    items: list[dict[str, Any]] = []
    messages: list[dict[str, str]] = []
    absorbed = 0
    for turn in range(3):
        question = user(words(f"absorbed {turn}", 40))
        items, messages = [*items, question], [*messages, question]
        # The random model does not end by itself: a piece of its own answer ends it.
        stop = said(ask(client, items, cache_prompt=False))[-4:]
        response = ask(client, items, stop=stop)
        if turn:
            assert response["usage"]["input_tokens_details"]["cached_tokens"] == absorbed
        if not said(response).strip():
            break
        items += response["output"]
        messages.append(assistant(said(response)))
        absorbed = reference.history_tokens(messages)
        until(lambda end=absorbed: end in {s["tokens"] for s in daemon.snapshots()}, "the answer is absorbed")


def test_hanging_up_stops_the_work(served: Served, official: openai.OpenAI):
    cancelled = "prefixd_requests_total{result=cancelled}"
    before = metrics(served.client)[cancelled]
    long = {"model": "tiny", "max_output_tokens": 15_000, "extra_body": {"ignore_eos": True}}
    with official.responses.create(**long, input="Go on and on.", stream=True) as stream:
        for _ in zip(range(8), stream, strict=False):
            pass
    served.daemon.wait_idle()
    assert metrics(served.client)[cancelled] - before == 1


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(served: Served, official: openai.OpenAI):
    """K-ST7."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            official.responses.create(**GREEDY, input=words("too long", 17_000), stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        assert "maximum context length is 16384 tokens" in refused.value.message
    assert served.daemon.snapshots() == []


def test_a_worker_that_dies_fails_the_response(start: Callable[..., Daemon]):
    daemon = start()
    client = daemon.wait_ready()
    body = {**GREEDY, **ENDLESS, "input": "On and on.", "stream": True}
    [worker] = daemon.processes("worker")
    with urlopen(Request(f"{client.url}/v1/responses", json.dumps(body).encode()), timeout=120) as response:
        read = b""
        while read.count(b"output_text.delta") < 6:
            read += response.readline()
        os.kill(worker, signal.SIGKILL)
        events, _ = read_events((read + response.read()).decode().split("\n"))
    final = check_stream(events)
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert said(final)
