"""What models make of each notation of calls: the many ways to write JSON, tags, lists and markers."""

from __future__ import annotations

from typing import Any

import pytest
from reply_rig import ONE, WRITTEN, calls, read

from gateway.reply import Reply


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"n": 1}, "name": "lookup"}', {"n": 1}),
        ('{"name": "lookup", "arguments": "{\\"n\\": 1}"}', {"n": 1}),
        ('{"name": "lookup"}', {}),
        ('{"name": "lookup", "arguments": null}', {}),
        ('{"id": "x", "name": "lookup", "arguments": {"n": 1}, "more": [1, "]}"]}', {"n": 1}),
        ('{"type": "function", "function": {"name": "lookup", "arguments": {"n": 1}}}', {"n": 1}),
        ('{"name": "lookup", "arguments": {"n": 1}}}', {"n": 1}),
        ('{"name": "lookup", "arguments": {"n": 1}', {"n": 1}),
        ('[{"name": "lookup", "arguments": {"n": 1}}]', {"n": 1}),
        ('{"name": "lookup", "arguments": {"q": "</tool_call>"}}', {"q": "</tool_call>"}),
    ],
)
def test_calls_in_json_may_be_written_in_many_ways(text: str, arguments: dict[str, Any]):
    for written in (f"<tool_call>\n{text}\n</tool_call>", f"<tool_call>{text}</tool_call>\nthen"):
        reply = read(written, "hermes")
        assert calls(reply) == [("lookup", arguments)]
        assert reply.text in ("", "then")


def test_arguments_without_an_end_go_no_further_than_their_marker():
    reply = read('<tool_call>{"name": "lookup", "arguments": {"n": 1</tool_call> after', "hermes")
    assert reply.calls[0].arguments == '{"n": 1'
    assert reply.calls[0].value() == '{"n": 1'
    assert reply.text == "after"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "parameters": {"age": 3}}',
        '{"name": "lookup", "age": 3}',
        '{"name": "lookup"}',
        '{"lookup": 1}',
        '{"answer": [1, 2, {"name": "lookup"}]}',
        "{ } and { more }",
        'Here: {"name": "lookup", "parameters": {}}',
    ],
)
def test_an_answer_in_json_is_no_call_where_calls_have_no_marker(text: str):
    assert read(text, "llama") == Reply(text)


def test_llama_marks_calls_at_times():
    for opener in ("<|python_tag|>", "<tool_call>\n"):
        reply = read(f"Wait. {opener}{WRITTEN['llama']}", "llama")
        assert (calls(reply), reply.text) == (ONE, "Wait.")


def test_mistral_writes_lists_too():
    text = (
        '[TOOL_CALLS] [{"name": "lookup", "arguments": {"n": 1}, "id": "0"}, {"name": "lookup", "arguments": {}}]'
    )
    assert calls(read(text, "mistral")) == [("lookup", {"n": 1}), ("lookup", {})]
    text = '[TOOL_CALLS]lookup[CALL_ID]000000001[ARGS]{"n": 1}[TOOL_CALLS]lookup{"n": 2}'
    assert calls(read(text, "mistral")) == [("lookup", {"n": 1}), ("lookup", {"n": 2})]


def tags(**values: str) -> str:
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=lookup>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"q": "5"}, {"q": "5"}),
        ({"q": "\n two lines \n\nmore\n"}, {"q": "\n two lines \n\nmore\n"}),
        ({"q": ""}, {"q": ""}),
        ({"q": '"quoted"'}, {"q": '"quoted"'}),
        ({"n": "5", "x": "5", "on": "true"}, {"n": 5, "x": 5, "on": True}),
        ({"on": "False", "any": "None"}, {"on": False, "any": None}),
        ({"n": "five"}, {"n": "five"}),
        ({"x": "NaN"}, {"x": "NaN"}),
        ({"list": '["a", {"b": 1}]'}, {"list": ["a", {"b": 1}]}),
        ({"maybe": "null"}, {"maybe": None}),
        ({"maybe": "7"}, {"maybe": "7"}),
        ({"any": '{"a": 1}'}, {"any": {"a": 1}}),
        ({"unknown": '{"a": 1}', "other": "words"}, {"unknown": {"a": 1}, "other": "words"}),
        ({"q": "<a></parameter></a>"}, {"q": "<a></parameter></a>"}),
        ({}, {}),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(values: dict[str, str], arguments: dict[str, Any]):
    assert calls(read(tags(**values), "qwen_xml")) == [("lookup", arguments)]


def test_tags_without_the_section_around_them_are_read():
    inner = tags(n="1").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert calls(read(inner, "qwen_xml")) == [("lookup", {"n": 1})]
    reply = read(f"Now:\n{inner}\n</tool_call>", "qwen_xml")
    assert (calls(reply), reply.text) == ([("lookup", {"n": 1})], "Now:")


def test_gemma_writes_lists_objects_and_forgotten_quotes():
    text = (
        '<|tool_call>call:lookup{list:[1,<|"|>a,b<|"|>,{k:true}],q:plain,x:-1.5e3,any:{},maybe:null}<tool_call|>'
    )
    expected = {"list": [1, "a,b", {"k": True}], "q": "plain", "x": -1500.0, "any": {}, "maybe": None}
    assert calls(read(text, "gemma4")) == [("lookup", expected)]
