"""Tool calls of the embedded model through the official client: whole, streamed, and what the next turn reuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import Served
from daemon import until

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# So small a model calls when it is shown the words.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": f"Repeat this text exactly:\n{CALL}"}]
FIELDS: dict[str, Any] = {"model": "m", "tools": [WEATHER], "temperature": 0, "max_tokens": 120}


@pytest.fixture
def official(real: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.client.url + "/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client


def test_a_tool_round_trip_reuses_the_whole_first_turn(packed: Served):
    url = packed.client.url
    with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=120) as official:
        first = official.chat.completions.create(messages=ASKED, **FIELDS)
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason) == (None, "tool_calls")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        prompt = first.usage.prompt_tokens
        until(lambda: max(s["tokens"] for s in packed.daemon.snapshots()) > prompt, "the answer is absorbed")
        echoed = message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        after = official.chat.completions.create(messages=[*ASKED, echoed, result], **FIELDS)
    cached = after.usage.prompt_tokens_details.cached_tokens
    assert cached > prompt
    assert after.usage.prompt_tokens - cached < 20


def test_a_stream_makes_the_same_calls(official: openai.OpenAI):
    asked = [{"role": "user", "content": f"Repeat this text exactly:\n{CALL}\n{CALL.replace('Paris', 'Rome')}"}]
    whole = official.chat.completions.create(messages=asked, **FIELDS).choices[0]
    with official.chat.completions.stream(messages=asked, **FIELDS) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls
    assert len(pieces) > len(whole.message.tool_calls)
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]
    assert streamed.finish_reason == whole.finish_reason


def test_no_tools_no_calls_and_the_same_prompt(official: openai.OpenAI):
    calling = official.chat.completions.create(messages=ASKED, **FIELDS)
    silent = official.chat.completions.create(messages=ASKED, tool_choice="none", **FIELDS)
    assert calling.choices[0].message.tool_calls
    assert silent.choices[0].message.tool_calls is None
    assert silent.choices[0].message.content.strip() == CALL
    assert silent.usage.prompt_tokens == calling.usage.prompt_tokens
    assert silent.usage.prompt_tokens_details.cached_tokens > 0
