"""The Anthropic dialect of a real daemon, through its official client and on the wire."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

import anthropic
import pytest
from anthropic_stream import added_up, broken_off, parse_events
from chat_model import words
from conftest import Served
from daemon import metrics
from http_client import Client, assistant, cache_header, system, user

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
# The official client of today knows no temperature.
OFFICIAL: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
COMPUTED, DEVICE = (f"prefixd_cache_tokens_total{{source={source}}}" for source in ("computed", "device"))
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def official(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.client.url, api_key="x", max_retries=0, timeout=120) as client:
        yield client


def post(client: Client, **fields: Any) -> Any:
    return client.request("POST", "/v1/messages?beta=true", {**GREEDY, **fields})


def total(usage: anthropic.types.Usage) -> int:
    return all_input(usage.to_dict())


def all_input(usage: dict[str, Any]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_later_turns_hit_and_every_account_of_them_agrees(served: Served, official: anthropic.Anthropic):
    head = [{"type": "text", "text": words("head", 200), **MARK}]
    history: list[dict[str, Any]] = []
    for turn in range(3):
        history.append({"role": "user", "content": [{"type": "text", "text": words(turn, 150), **MARK}]})
        before = metrics(served.client)
        counted = official.messages.count_tokens(model="tiny", system=head, messages=history)
        raw = official.messages.with_raw_response.create(**OFFICIAL, system=head, messages=history)
        message = raw.parse()
        after = metrics(served.client)
        outcome, depth, reason = cache_header(dict(raw.headers))
        assert (outcome == "hit") is (turn > 0)
        written = message.usage.cache_creation_input_tokens
        assert message.usage.cache_read_input_tokens == depth == after[DEVICE] - before[DEVICE]
        assert message.usage.input_tokens + written == after[COMPUTED] - before[COMPUTED]
        assert counted.input_tokens == total(message.usage)
        if turn:
            assert depth > 0.5 * counted.input_tokens
        explained = json.loads(served.daemon.cachectl("--json", "explain", message._request_id).stdout)
        assert (explained["outcome"], explained["depth"], explained["reason"]) == (outcome, depth, reason)
        assert depth + written == max(explained["committed"])
        assert explained["prompt_tokens"] == counted.input_tokens
        assert explained["completion_tokens"] == message.usage.output_tokens
        # The mark moves on, and the text comes back as a string: neither is a change.
        history[-1] = {"role": "user", "content": words(turn, 150)}
        history.append({"role": "assistant", "content": message.content})


def test_both_dialects_share_prompts_answers_and_snapshots(served: Served):
    question, told = user(words("question", 120)), system(words("told", 80))
    history = [question, assistant("An answer."), user("And then?")]
    for fields in ({}, {"temperature": 0.8, "seed": 3}):
        chat = served.client.chat([told, *history], **fields)
        blocks = [{"type": "text", "text": told["content"]}]
        message = post(served.client, system=blocks, messages=history, **fields).body
        assert "".join(block["text"] for block in message["content"]) == chat.text
        usage = message["usage"]
        assert all_input(usage) == chat.prompt_tokens
        assert usage["cache_read_input_tokens"] > 0.9 * chat.prompt_tokens - 30
        assert message["prefixd"]["outcome"] == "hit"
        assert usage["output_tokens"] == chat.usage["completion_tokens"]


def test_a_stream_adds_up_to_the_whole_message(served: Served, official: anthropic.Anthropic):
    messages = [user(words("stream", 90))]
    whole = post(served.client, messages=messages).body
    cold = added_up(parse_events(post(served.client, messages=messages, stream=True, cache_prompt=False).raw))
    warm = added_up(parse_events(post(served.client, messages=messages, stream=True).raw))
    for streamed in (cold, warm):
        assert streamed["content"] == whole["content"]
        assert streamed["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert cold["usage"]["cache_read_input_tokens"] == 0 < warm["usage"]["cache_read_input_tokens"]
    with official.messages.stream(**OFFICIAL, messages=messages) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole["content"][0]["text"]
    assert total(final.usage) == all_input(whole["usage"])


def test_an_answer_that_was_begun_goes_on(served: Served):
    begun = [user("Say something."), {"role": "assistant", "content": "The river "}]
    answer = post(served.client, messages=begun).body
    chat = served.client.chat(begun)
    assert answer["content"][0]["text"] == chat.text
    counted = served.client.request("POST", "/v1/messages/count_tokens", {"messages": begun}).body
    assert counted["input_tokens"] == chat.prompt_tokens


def test_a_stop_sequence_is_named_and_not_part_of_the_text(served: Served):
    messages = [user(words("stopped", 60))]
    text = post(served.client, messages=messages, max_tokens=40).body["content"][0]["text"]
    stop = text[10:14]
    for stream in (False, True):
        answer = post(served.client, messages=messages, max_tokens=40, stop_sequences=[stop], stream=stream)
        message = added_up(parse_events(answer.raw)) if stream else answer.body
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
        assert "".join(block["text"] for block in message["content"]) == text[: text.index(stop)]


def test_a_history_of_tools_is_reused(served: Served, official: anthropic.Anthropic):
    tools = [{"name": "look", "description": words("tool", 60), "input_schema": {"type": "object"}}]
    history: list[dict[str, Any]] = [user(words("tools", 80))]
    official.messages.create(**OFFICIAL, tools=tools, messages=history)
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "look", "input": {"at": n}} for n in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": words(call["id"], 30)} for call in calls
    ]
    history += [
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, *calls]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]
    second = official.messages.create(**OFFICIAL, tools=tools, messages=history)
    assert second.usage.cache_read_input_tokens > 0
    third = official.messages.create(
        **OFFICIAL, tools=tools, messages=[*history, {"role": "assistant", "content": second.content}, user("So?")]
    )
    assert third.usage.cache_read_input_tokens > 0.9 * total(second.usage) - 30


def test_counting_takes_nothing_from_those_who_are_served(served: Served):
    """K-ST9: many counts while an answer is being generated."""
    body = {"messages": [user(words("counted", 300))], "system": "Be brief."}
    before = metrics(served.client)
    with served.client.stream([user("Go on and on.")], max_tokens=300, ignore_eos=True) as stream:
        assert stream.take_text(1)
        with ThreadPoolExecutor(8) as threads:
            counts = set(
                threads.map(
                    lambda _: served.client.request("POST", "/v1/messages/count_tokens", body).body[
                        "input_tokens"
                    ],
                    range(50),
                )
            )
        assert "error" not in list(stream)[-1]
        assert stream.is_done
    assert len(counts) == 1
    after = metrics(served.client)
    finished = "prefixd_requests_total{result=finished}"
    assert after[finished] - before[finished] == 1
    answer = post(served.client, **body)
    assert answer.body["prefixd"]["reason"] in ("cold", "diverged")
    assert all_input(answer.body["usage"]) in counts


def test_hanging_up_stops_the_work(served: Served, official: anthropic.Anthropic):
    cancelled = "prefixd_requests_total{result=cancelled}"
    before = metrics(served.client)[cancelled]
    long = {**OFFICIAL, "max_tokens": 15_000, "extra_body": {"ignore_eos": True}}
    with official.messages.stream(**long, messages=[user("Go on and on.")]) as stream:
        for _ in zip(range(5), stream.text_stream, strict=False):
            pass
    served.daemon.wait_idle()
    assert metrics(served.client)[cancelled] - before == 1


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(served: Served, official: anthropic.Anthropic):
    """K-ST7: in the words by which clients know that they must compact."""
    messages = [user(words("too long", 17_000))]
    number = official.messages.count_tokens(model="tiny", messages=messages).input_tokens
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as refused:
            official.messages.create(**OFFICIAL, messages=messages, stream=stream)
        error = refused.value.body["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"prompt is too long: {number} tokens > 16383 maximum")
    assert served.daemon.snapshots() == []


def test_a_worker_that_dies_ends_the_stream_with_an_error_event(start):
    daemon = start()
    client = daemon.wait_ready()
    body = {**GREEDY, "max_tokens": 15_000, "ignore_eos": True, "stream": True, "messages": [user("On and on.")]}
    [worker] = daemon.processes("worker")
    with urlopen(Request(f"{client.url}/v1/messages", json.dumps(body).encode()), timeout=120) as response:
        read = b""
        while read.count(b"content_block_delta") < 6:
            read += response.readline()
        os.kill(worker, signal.SIGKILL)
        error = broken_off(parse_events(read + response.read()))
    assert error["error"]["type"] == "overloaded_error"
    assert error["request_id"]
