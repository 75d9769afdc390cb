"""Anthropic bodies in canonical form: the same conversation is the same in either dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_worker import MODEL, FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from served import Served

from gateway import anthropic_input, anthropic_tools, canonical
from gateway.anthropic_params import parse_params
from gateway.conversation import Conversation, Message, ToolCall
from gateway.prompts import PromptMaker
from protocol.errors import RequestError

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(call_id: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content[0] if content else None, **more}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "lookup", "input": arguments}


def parsed(*messages: dict[str, Any], system: Any = None) -> tuple[Message, ...]:
    return anthropic_input.parse_messages(system, list(messages))


def test_system_text_comes_first_and_is_one_message():
    same = [parsed(USER, system=s) for s in ("Be brief.", [text("Be brief.")], [text("Be brief.", **MARK)])]
    assert same == [(Message("system", "Be brief."), Message("user", "hi"))] * 3
    assert parsed(USER, system=[text("a"), text("b")])[0] == Message("system", "a\nb")
    for nothing in (None, "", []):
        assert parsed(USER, system=nothing) == (Message("user", "hi"),)


def test_the_billing_line_is_left_out_where_it_stands_first():
    line = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli;"
    assert parsed(USER, system=[text(line), text("You are.", **MARK)])[0] == Message("system", "You are.")
    assert parsed(USER, system=[text(line)]) == (Message("user", "hi"),)
    kept = anthropic_input.parse_messages([text(line)], [USER], drop_billing_header=False)
    assert kept[0] == Message("system", line)
    assert parsed({"role": "user", "content": line}) == (Message("user", line),)


def test_results_and_text_of_one_message_keep_their_order():
    content = [
        result("a", "one", is_error=True, **MARK),
        text("between"),
        text("and more", **MARK),
        result("b", [text("two"), text("lines")]),
        result("c"),
        text("at last"),
    ]
    called = {"role": "assistant", "content": [use(name) for name in "abc"]}
    assert parsed(called, {"role": "user", "content": content})[1:] == (
        Message("tool", "one", tool_call_id="a"),
        Message("user", "between\nand more"),
        Message("tool", "two\nlines", tool_call_id="b"),
        Message("tool", "", tool_call_id="c"),
        Message("user", "at last"),
    )


def test_results_alone_leave_no_empty_message():
    called = {"role": "assistant", "content": [use("a")]}
    told = parsed(called, {"role": "user", "content": [result("a", "one")]})
    assert told[1:] == (Message("tool", "one", tool_call_id="a"),)
    assert parsed({"role": "user", "content": []}) == (Message("user", ""),)


def test_an_answer_is_one_message_with_its_thinking_and_calls():
    content = [
        {"type": "thinking", "thinking": "Hm.\n", "signature": "x"},
        {"type": "redacted_thinking", "data": "zzz"},
        text("\n\nLet me look.", citations=None),
        use("a", where="here"),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        use("b"),
    ]
    calls = (ToolCall("a", "lookup", {"where": "here"}), ToolCall("b", "lookup", {}))
    expected = Message("assistant", "Let me look.", calls, reasoning="Hm.")
    assert parsed(USER, {"role": "assistant", "content": content}, USER)[1] == expected


def test_text_that_a_call_divided_is_the_text_it_was():
    """So what was absorbed is what comes back."""
    divided = [text("Looking."), use("a"), text(" And on.")]
    assert parsed({"role": "assistant", "content": divided}, USER)[0].content == "Looking. And on."
    lines = [text("one"), text("two")]
    assert parsed({"role": "assistant", "content": lines}, USER)[0].content == "one\ntwo"


def test_a_last_message_of_the_assistant_is_carried_on_to_its_last_blank():
    messages = parsed(USER, {"role": "assistant", "content": "Well, "})
    assert messages[1] == Message("assistant", "Well, ")
    assert Conversation(messages).continues


def test_system_messages_stay_where_they_are():
    late = {"role": "system", "content": [text("The date has changed.", **MARK)]}
    assert parsed(USER, late, USER, system="x")[2] == Message("system", "The date has changed.")


def test_only_tools_that_the_client_describes_are_shown():
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    given = [
        {"name": "lookup", "description": "Looks.", "input_schema": schema, **MARK},
        {"type": "custom", "name": "other", "input_schema": {"type": "object"}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ]
    assert anthropic_tools.parse_tools(given).shown == canonical.parse_tools(
        [
            {"type": "function", "function": {"name": "lookup", "description": "Looks.", "parameters": schema}},
            {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}},
        ]
    )
    shuffled = anthropic_tools.parse_tools(given[::-1], in_order=True).shown
    assert shuffled == anthropic_tools.parse_tools(given, in_order=True).shown
    assert anthropic_tools.parse_tools(None).shown == ()


def deferred(name: str) -> dict[str, Any]:
    return {"name": name, "description": "Does.", "input_schema": {"type": "object"}, "defer_loading": True}


def line(name: str) -> str:
    schema = '{"type": "object", "properties": {}}'
    return f'<function>{{"description": "Does.", "name": "{name}", "parameters": {schema}}}</function>'


def test_deferred_tools_are_described_where_a_search_found_them():
    found = [{"type": "tool_reference", "tool_name": name, **MARK} for name in ("fetch", "watch")]
    tools = anthropic_tools.parse_tools(
        [deferred("fetch"), {"name": "look", "input_schema": {}}, deferred("watch")]
    )
    assert [tool["function"]["name"] for tool in tools.shown] == ["look"]
    assert tools.loaded == ()
    searched = {"role": "assistant", "content": [use("a")]}
    answered = {"role": "user", "content": [result("a", [text("Two."), *found]), text("Well?")]}
    told = anthropic_input.parse_messages(None, [searched, answered], tools)
    lines = f"Two.\n<functions>\n{line('fetch')}\n{line('watch')}\n</functions>"
    assert told[1:] == (Message("tool", lines, tool_call_id="a"), Message("user", "Well?"))
    assert [tool["function"]["name"] for tool in tools.loaded] == ["fetch", "watch"]


def test_references_bring_in_only_so_much_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(anthropic_tools, "_MOST_TEXT", 3 * len(line("fetch")))
    tools = anthropic_tools.parse_tools([deferred("fetch")])
    found = [{"type": "tool_reference", "tool_name": "fetch"}] * 4
    turns = [{"role": "assistant", "content": [use("a")]}, {"role": "user", "content": [result("a", found)]}]
    with pytest.raises(RequestError, match="brings in descriptions of more than"):
        anthropic_input.parse_messages(None, turns, tools)


def test_tools_come_and_go_in_system_messages():
    tools = anthropic_tools.parse_tools([deferred("fetch")])
    definition = {"name": "new", "description": "Does.", "input_schema": {"type": "object"}}
    content = [
        text("Since now:"),
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
    ]
    again = {"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "new"}}]}
    told = anthropic_input.parse_messages(None, [USER, {"role": "system", "content": content}, again], tools)
    functions = f"<functions>\n{line('fetch')}\n{line('new')}\n</functions>"
    assert told[1].content == f"Since now:\n{functions}\nThe tool look is no longer available."
    assert told[2].content == f"<functions>\n{line('new')}\n</functions>"
    assert [tool["function"]["name"] for tool in tools.loaded] == ["fetch", "new"]


def test_tools_that_only_another_server_could_find_are_all_shown():
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    tools = anthropic_tools.parse_tools([search, deferred("fetch")])
    assert [tool["function"]["name"] for tool in tools.shown] == ["fetch"]


@pytest.mark.parametrize(
    ("block", "where", "problem"),
    [
        ({"type": "tool_reference", "tool_name": "none"}, "", "is no tool that this request describes"),
        ({"type": "tool_reference"}, "", "must name a tool"),
        ({"type": "tool_addition"}, ".tool", "must name a tool"),
        ({"type": "tool_addition", "tool": {"type": "tool_definition"}}, ".tool.definition", "must be an object"),
        ({"type": "tool_removal", "tool": {"name": 3}}, ".tool", "must name a tool"),
    ],
)
def test_blocks_about_tools_that_make_no_sense_are_refused(block: dict[str, Any], where: str, problem: str):
    for content, field in (
        ({"role": "system", "content": [block]}, "messages.0.content.0"),
        ({"role": "user", "content": [result("a", [block])]}, "messages.0.content.0.content.0"),
    ):
        with pytest.raises(RequestError) as refused:
            parsed(content)
        assert str(refused.value) == f"{field}{where} {problem}"


@pytest.mark.parametrize(
    ("thinking", "on"),
    [(None, None), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled"}, True)],
)
def test_thinking_is_told_to_the_template(thinking: object, on: bool | None):
    params = parse_params({"max_tokens": 1, "thinking": thinking})
    assert params.variables() == ({} if on is None else {"enable_thinking": on, "thinking": on})
    own = parse_params({"max_tokens": 1, "thinking": thinking, "chat_template_kwargs": {"enable_thinking": 3}})
    assert own.variables()["enable_thinking"] == 3


# The same conversation, written by a client of either API.

words = st.text("ab <é\n", max_size=8)
said = words.filter(str.strip)
answers = st.tuples(words, st.lists(st.dictionaries(st.sampled_from("xyz"), words, max_size=2), max_size=2), words)
turns = st.lists(st.tuples(said, answers), max_size=3)


def as_blocks(draw: st.DrawFn, content: str) -> Any:
    """One text, as a string or as a block, marked or not."""
    if draw(st.booleans()):
        return content
    return [text(content, **draw(st.sampled_from([{}, MARK])))]


@st.composite
def in_both_dialects(draw: st.DrawFn) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    openai: list[dict[str, Any]] = []
    anthropic: list[dict[str, Any]] = []
    system = draw(said)
    openai.append({"role": "system", "content": system})
    for number, (question, (answer, calls, thought)) in enumerate(draw(turns)):
        openai.append({"role": "user", "content": question})
        anthropic.append({"role": "user", "content": as_blocks(draw, question)})
        ids = [f"call_{number}_{at}" for at in range(len(calls))]
        openai.append(
            {
                "role": "assistant",
                "content": answer or (None if calls else ""),
                "reasoning_content": thought,
                "tool_calls": [
                    {"id": call_id, "function": {"name": "lookup", "arguments": json.dumps(call, indent=1)}}
                    for call_id, call in zip(ids, calls, strict=True)
                ],
            }
        )
        blocks = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        blocks += [text(answer)] if answer else []
        blocks += [use(call_id, **call) for call_id, call in zip(ids, calls, strict=True)]
        anthropic.append({"role": "assistant", "content": blocks})
        if calls:
            openai += [{"role": "tool", "tool_call_id": call_id, "content": answer} for call_id in ids]
            anthropic.append({"role": "user", "content": [result(i, as_blocks(draw, answer)) for i in ids]})
    last = draw(said)
    openai.append({"role": "user", "content": last})
    if anthropic and anthropic[-1]["role"] == "user":
        anthropic[-1]["content"].append(text(last))
    else:
        anthropic.append({"role": "user", "content": last})
    return (
        canonical.parse_messages(openai),
        anthropic_input.parse_messages(as_blocks(draw, system), anthropic),
    )


@given(in_both_dialects())
def test_a_conversation_is_the_same_in_either_dialect(maker: PromptMaker, both: tuple):
    openai, anthropic = both
    assert anthropic == openai
    assert maker.count(Conversation(anthropic), MODEL) == len(maker.trace(Conversation(openai)).token_ids)


WRONG = [
    ({"messages": []}, "messages must not be empty"),
    ({"messages": "hi"}, "messages must be a list"),
    ({}, "messages must be a list"),
    ({"messages": [USER, "hi"]}, "messages.1 must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be one of user, assistant, system"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role must be"),
    ({"messages": [{"role": "user"}]}, "messages.0.content must be a string or a list of blocks"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content must be"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0 must be an object"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text must be a string",
    ),
    (
        {"messages": [USER, {"role": "user", "content": [text("x"), IMAGE]}]},
        "messages.1.content.1 has type 'image', which this model does not take here",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages.0.content.0.source must be an object",
    ),
    ({"messages": [{"role": "user", "content": [use("a")]}]}, "messages.0.content.0 has type 'tool_use'"),
    (
        {"messages": [{"role": "user", "content": [result("a", [IMAGE])]}]},
        "messages.0.content.0.content.0 has type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id must be a string",
    ),
    (
        {"messages": [{"role": "assistant", "content": [result("a", "x")]}]},
        "messages.0.content.0 has type 'tool_result'",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.id must be"),
    (
        {"messages": [{"role": "assistant", "content": [{**use("a"), "input": 3}]}]},
        "messages.0.content.0.input must be",
    ),
    ({"system": 3}, "system must be"),
    ({"system": [IMAGE]}, "system.0 has type 'image'"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [3]}, "tools.0 must be an object"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema must be an object"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name must be a string"),
    ({"max_tokens": None}, "max_tokens: Field required"),
    ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature: Input should be a valid number"),
    ({"top_k": 1.5}, "top_k: Input should be a valid integer"),
    ({"stop_sequences": "x"}, "stop_sequences: Input should be a valid list"),
    ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1 character"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    ({"thinking": {"type": "wild"}}, "thinking.type: Input should be"),
    ({"tool_choice": "auto"}, "tool_choice: Input should be"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    ({"tool_choice": {"type": "tool", "name": "lookup"}}, "tool_choice: there is no such tool"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format: the schema",
    ),
    ({"model": 5}, "model: Input should be a valid string"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages cannot be set"),
]


@pytest.mark.parametrize(("fields", "problem"), WRONG, ids=[problem for _, problem in WRONG])
async def test_a_wrong_field_is_named(served: Served, worker: FakeWorker, fields: dict, problem: str):
    body = {"max_tokens": 5, **({} if problem.startswith("messages") else {"messages": [USER]}), **fields}
    response = await served.post("/v1/messages", body)
    error = await response.json()
    assert (response.status, error["error"]["type"]) == (400, "invalid_request_error")
    assert error["error"]["message"].startswith(problem)
    assert not worker.requests


async def test_counting_needs_no_limit(served: Served):
    response = await served.post("/v1/messages/count_tokens", {"messages": [USER]})
    assert response.status == 200


def test_what_is_wrong_is_a_request_error():
    with pytest.raises(RequestError) as refused:
        parsed({"role": "user", "content": [IMAGE]})
    assert refused.value.param == "messages.0.content.0"
