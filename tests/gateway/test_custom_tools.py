"""Free-form tools of chat completions: offered as functions of one text, called and echoed in the API's own form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fake_worker import FakeWorker, say
from served import Served
from test_chat import events
from test_forced_calls import fits
from test_tool_calls import ASKED, LOOKUP, ONE

from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import ToolCall
from gateway.custom_tools import custom_input, custom_names
from protocol.errors import RequestError

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Patch."}}
GIVEN = 'a "line"\nand ünother'
ARGUMENTS = json.dumps({"input": GIVEN}, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "patch", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture
async def official(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as made:
        yield made


def test_it_is_a_function_of_one_text():
    plain, told = parse_tools([PATCH, {"type": "custom", "custom": {"name": "b", "format": GRAMMAR}}])
    assert plain["function"]["name"] == "patch"
    assert plain["function"]["parameters"]["required"] == ["input"]
    assert "`input` follows this regex grammar:\n[a-z]+" in told["function"]["description"]


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([PATCH, LOOKUP], {"patch"}),
        ([3, {"type": "custom"}, {"type": "custom", "custom": {"name": 3}}], set()),
        ("x", set()),
    ],
)
def test_their_names_are_found(tools: Any, names: set[str]):
    assert custom_names(tools) == names


async def test_a_call_has_its_own_form_beside_others(worker: FakeWorker, official: openai.AsyncOpenAI):
    worker.script = say(f"{CALL}\n{ONE}")
    answer = await official.chat.completions.create(model="m", messages=ASKED, tools=[PATCH, LOOKUP])
    choice = answer.choices[0]
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", GIVEN)
    assert (function.type, function.function.name) == ("function", "lookup")
    assert choice.finish_reason == "tool_calls"
    history = [
        *ASKED,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": custom.id, "content": "Done."},
    ]
    await official.chat.completions.create(model="m", messages=history, tools=[PATCH])
    assert parse_messages(history)[1].tool_calls[0] == ToolCall(custom.id, "patch", {"input": GIVEN})


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_gives_its_input_once_and_whole(served: Served, worker: FakeWorker, n: int):
    worker.script = say(f"{CALL}\n{ONE}")
    chunks, _ = await events(await served.chat(messages=ASKED, tools=[PATCH, LOOKUP], stream=True, n=n))
    for number in range(n):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == number]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        first = [call for call in calls if call["index"] == 0]
        assert first[0].pop("id").startswith("call_")
        assert first == [
            {"index": 0, "type": "custom", "custom": {"name": "patch", "input": ""}},
            {"index": 0, "custom": {"input": GIVEN}},
        ]
        assert all("custom" not in call for call in calls if call["index"] == 1)
        assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "a\\nb', "a\nb"),
        ('{ "input" : "a\\', "a"),
        ('{"input": "a\\u00f', "a"),
        ('{"input": "a\\ud83d', "a\ufffd"),
        ('{"input": "', ""),
        ('{"input": "a"', "a"),
        ('{"input', '{"input'),
        ('{"other": 3', '{"other": 3'),
    ],
)
def test_of_a_call_that_was_cut_off_it_is_what_came(arguments: str, given: str):
    assert custom_input(arguments, arguments) == given


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ],
)
async def test_it_can_be_forced(served: Served, worker: FakeWorker, choice: Any):
    worker.script = say(CALL)
    assert (await served.chat(messages=ASKED, tools=[PATCH, LOOKUP], tool_choice=choice)).status == 200
    assert fits(worker, CALL)
    assert not fits(worker, "I cannot.")
    assert fits(worker, ONE) == (choice == "required")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"type": "custom"}, "custom"),
        ({"type": "custom", "custom": {"name": "patch"}}, "custom.input"),
        ({"type": "custom", "custom": {"input": "x"}}, "custom.name"),
    ],
)
def test_what_is_wrong_in_an_echo_is_named(call: dict[str, Any], field: str):
    with pytest.raises(RequestError) as refused:
        parse_messages([*ASKED, {"role": "assistant", "tool_calls": [call]}])
    assert refused.value.param == f"messages.1.tool_calls.0.{field}"


@pytest.mark.parametrize("custom", [None, {}, {"name": 3}])
def test_a_tool_without_a_name_is_refused(custom: Any):
    with pytest.raises(RequestError) as refused:
        parse_tools([{"type": "custom", "custom": custom}])
    assert refused.value.param.startswith("tools.0.custom")
