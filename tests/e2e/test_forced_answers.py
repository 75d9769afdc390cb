"""Answers that must have a form, of the embedded model: JSON of a schema and forced calls, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from conftest import Served
from http_client import user
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """What the schema says; strings have an end, so that so small a model finds it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=60)
    sky: Literal["clear", "cloudy"]


SCHEMA: dict[str, Any] = Weather.model_json_schema()
ASKED: list[Any] = [user("How is the weather in Paris? It is 21 degrees and there are clouds.")]
FUNCTION = {"name": "report_weather", "description": "Report the weather.", "parameters": SCHEMA}
OTHER = {"name": "stop", "description": "Stop.", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": OTHER}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "report_weather"}}
FIELDS: dict[str, Any] = {"model": "m", "temperature": 0}


@pytest.fixture
def official(real: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.client.url + "/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client


def valid(text: str) -> Weather:
    return Weather.model_validate_json(text)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_is_json_of_the_schema(official: openai.OpenAI, temperature: float):
    fields = {**FIELDS, "temperature": temperature, "seed": 4, "n": 3, "response_format": FORMAT}
    answer = official.chat.completions.create(messages=ASKED, **fields)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    read = [valid(choice.message.content) for choice in answer.choices]
    assert len({one.model_dump_json() for one in read}) == (1 if temperature == 0 else 3)


def test_only_allowed_tools_are_called_and_the_prompt_is_found_again(official: openai.OpenAI):
    closed = {
        "name": "stop",
        "description": "Stop.",
        "parameters": {"type": "object", "additionalProperties": False},
    }
    tools: list[Any] = [TOOLS[0], {"type": "function", "function": closed}]
    called, cached = [], []
    for name in ("stop", "report_weather"):
        only = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": only}
        answer = official.chat.completions.create(messages=ASKED, tools=tools, tool_choice=choice, **FIELDS)
        called += [call.function.name for call in answer.choices[0].message.tool_calls]
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert called == ["stop", "report_weather"]
    assert cached[0] == 0 < 0.9 * answer.usage.prompt_tokens < cached[1]
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    free: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}
    fields: Any = {"model": "m", "input": ASKED, "tools": functions, "tool_choice": free}
    response = official.responses.create(**fields, temperature=0, max_output_tokens=60)
    assert {item.name for item in response.output if item.type == "function_call"} <= {"stop"}
    assert official.responses.input_tokens.count(**fields).input_tokens == response.usage.input_tokens


def test_any_object_is_an_object(official: openai.OpenAI):
    fields = {**FIELDS, "max_tokens": 60, "response_format": {"type": "json_object"}}
    choice = official.chat.completions.create(messages=ASKED, **fields).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_forced_stream_joins_to_the_whole_answer(official: openai.OpenAI):
    for fields in ({"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": NAMED}):
        whole = official.chat.completions.create(messages=ASKED, **FIELDS, **fields).choices[0]
        with official.chat.completions.create(messages=ASKED, stream=True, **FIELDS, **fields) as stream:
            pieces = [choice for chunk in stream for choice in chunk.choices]
        calls = [call.function for piece in pieces for call in piece.delta.tool_calls or []]
        assert "".join(piece.delta.content or "" for piece in pieces) == (whole.message.content or "")
        whole_calls = [call.function for call in whole.message.tool_calls or []]
        assert [call.name for call in calls if call.name] == [call.name for call in whole_calls]
        assert "".join(call.arguments or "" for call in calls) == "".join(call.arguments for call in whole_calls)
        assert pieces[-1].finish_reason == whole.finish_reason


def test_the_next_turn_hits_and_is_that_of_a_cold_start(real: Served):
    fields: dict[str, Any] = {"response_format": FORMAT, "max_tokens": 100, "logprobs": True, "top_logprobs": 2}
    first = real.client.chat(ASKED, **fields)
    assert first.choices == real.client.cold(ASKED, **fields).choices
    later = [*ASKED, {"role": "assistant", "content": first.text}, user("And in Rome?")]
    warm, cold = real.client.chat(later, **fields), real.client.cold(later, **fields)
    assert warm.cached_tokens > 0
    assert cold.cached_tokens == 0
    assert warm.choices == cold.choices
    valid(warm.text)


def test_free_answers_are_the_same_beside_a_forced_one(real: Served):
    alone = real.client.chat(ASKED, max_tokens=40, logprobs=True)
    with real.client.stream(ASKED, max_tokens=40, logprobs=True) as free:
        forced = real.client.chat(ASKED, max_tokens=100, response_format=FORMAT)
        beside = list(free)
    valid(forced.text)
    scores = [
        s for event in beside for c in event["choices"] for s in (c.get("logprobs") or {}).get("content", [])
    ]
    assert scores == alone.choices[0]["logprobs"]["content"]


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_chat_is_forced_to_call(official: openai.OpenAI, choice: Any):
    tools = TOOLS if choice is NAMED else TOOLS[:1]
    answer = official.chat.completions.create(messages=ASKED, **FIELDS, tools=tools, tool_choice=choice)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    (call,) = message.tool_calls
    assert call.function.name == "report_weather"
    valid(call.function.arguments)
    echoed = [*ASKED, message.model_dump(exclude_none=True)]
    echoed.append({"role": "tool", "tool_call_id": call.id, "content": "Thank you."})
    after = official.chat.completions.create(messages=echoed, **FIELDS, tools=tools, tool_choice=choice)
    assert after.usage.prompt_tokens_details.cached_tokens > 0
    valid(after.choices[0].message.tool_calls[0].function.arguments)


def test_a_response_is_forced(official: openai.OpenAI):
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    for choice in ("required", {"type": "function", "name": "report_weather"}):
        called = official.responses.create(input=ASKED, **FIELDS, tools=[tool], tool_choice=choice)
        (call,) = (item for item in called.output if item.type == "function_call")
        assert call.name == "report_weather"
        valid(call.arguments)
    form: Any = {"format": {"type": "json_schema", "name": "weather", "strict": True, "schema": SCHEMA}}
    answer = official.responses.create(input=ASKED, **FIELDS, text=form)
    valid(answer.output_text)
    assert answer.text.format.type == "json_schema"


def test_a_message_is_forced(real: Served):
    tool: Any = {"name": "report_weather", "description": "Report.", "input_schema": SCHEMA}
    fields: Any = {"model": "m", "max_tokens": 200, "messages": ASKED}
    greedy: dict[str, Any] = {"temperature": 0}
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "report_weather"}]
    with anthropic.Anthropic(base_url=real.client.url, api_key="x", max_retries=0, timeout=120) as official:
        for choice in choices:
            whole = official.messages.create(**fields, tools=[tool], tool_choice=choice, extra_body=greedy)
            (block,) = whole.content
            assert (whole.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "report_weather")
            Weather.model_validate(block.input)
            with official.messages.stream(**fields, tools=[tool], tool_choice=choice, extra_body=greedy) as stream:
                assert stream.get_final_message().content[0].input == block.input
        form: Any = greedy | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        valid(official.messages.create(**fields, extra_body=form).content[0].text)


def test_a_limit_cuts_a_forced_call_off(official: openai.OpenAI):
    fields = {**FIELDS, "max_tokens": 20, "tools": TOOLS, "tool_choice": NAMED}
    choice = official.chat.completions.create(messages=ASKED, **fields).choices[0]
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no such",
        ),
    ],
)
def test_what_cannot_be_forced_is_refused(real: Served, fields: dict[str, Any], param: str, reason: str):
    refused = real.client.chat(ASKED, **fields)
    assert (refused.status, refused.error["param"]) == (400, param)
    assert reason in refused.error["message"]
    assert real.daemon.snapshots() == []
