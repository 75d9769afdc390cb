"""A call in every notation, and the answers that texts are taken apart to, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.reply import CallArguments, CallEnd, CallStart, Part, Reply, merged
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_parser import StreamParser

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "n": {"type": "integer"},
                "x": {"type": "number"},
                "on": {"type": "boolean"},
                "list": {"type": "array"},
                "maybe": {"type": ["string", "null"]},
                "any": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
        },
    },
}


def parser(notation: str | None, thinking: str | None = None, **options: Any) -> StreamParser:
    settings = {"inside": False, "one_call": False} | options
    return StreamParser(THINKINGS.get(thinking), NOTATIONS.get(notation), Calls((TOOL,)), **settings)


def parse(
    text: str, notation: str | None, thinking: str | None = None, step: int = 0, **options: Any
) -> list[Part]:
    """The parts of a text fed in pieces of `step` characters, ids left out; checks the grammar."""
    reading = parser(notation, thinking, **options)
    parts: list[Part] = []
    step = step or len(text) or 1
    for at in range(0, len(text), step):
        parts += reading.feed(text[at : at + step])
    parts += reading.finish()
    return well_formed(parts)


def well_formed(parts: list[Part]) -> list[Part]:
    """The parts merged, with call ids left out; fails where a call is not started, ended or numbered right."""
    plain: list[Part] = []
    open_call: int | None = None
    count = 0
    for part in parts:
        match part:
            case CallStart(index, call_id, name):
                assert open_call is None
                assert index == count
                assert call_id.startswith("call_")
                open_call, count = index, count + 1
                part = CallStart(index, "", name)
            case CallArguments(index, fragment):
                assert index == open_call
                assert fragment
            case CallEnd(index):
                assert index == open_call
                open_call = None
            case _:
                assert open_call is None
                assert part.text
        plain.append(part)
    assert open_call is None
    return list(merged(plain))


def read(text: str, notation: str | None, thinking: str | None = None, **options: Any) -> Reply:
    """The answer that a text is; the same for every way of cutting it."""
    whole = parse(text, notation, thinking, **options)
    for step in (1, 2, 3, 7, 16):
        assert parse(text, notation, thinking, step, **options) == whole
    return Reply.of(whole)


def calls(reply: Reply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


ONE = [("lookup", {"q": 'größe 😀 "x" \\ </b>\n', "n": 7})]
JSON = json.dumps(ONE[0][1], ensure_ascii=False)
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "lookup", "arguments": {JSON}}}\n</tool_call>',
    "llama": f'{{"name": "lookup", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS]lookup[ARGS]{JSON}",
    "qwen_xml": '<tool_call>\n<function=lookup>\n<parameter=q>\ngröße 😀 "x" \\ </b>\n\n</parameter>\n'
    "<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>",
    "seed": '<seed:tool_call>\n<function=lookup>\n<parameter=q>größe 😀 "x" \\ </b>\n</parameter>\n'
    "<parameter=n>7</parameter>\n</function>\n</seed:tool_call>",
    "minicpm": '<function name="lookup"><param name="q">größe 😀 "x" \\ </b>\n</param><param name="n">7</param>'
    "</function>",
    "glm": '<tool_call>lookup\n<arg_key>q</arg_key>\n<arg_value>größe 😀 "x" \\ </b>\n</arg_value>\n'
    "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:lookup{q:<|"|>größe 😀 "x" \\ </b>\n<|"|>,n:7}<tool_call|>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>lookup<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "harmony": f"to=functions.lookup<|channel|>commentary json<|message|>{JSON}",
    "solar": f"<|tool_calls|><|tool_call:begin|>call_1<|tool_call:name|>lookup<|tool_call:args|>{JSON}"
    "<|tool_call:end|>",
    "functionary": f"<function=lookup>{JSON}</function>",
    "apertus": f'<|tools_prefix|>[{{"lookup": {JSON}}}]<|tools_suffix|>',
    "cohere": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "lookup", "parameters": {JSON}}}\n]'
    "<|END_ACTION|>",
    "command_r": f'Action:\n```json\n[\n{{"tool_name": "lookup", "parameters": {JSON}}}]```',
    "nemotron": f'<TOOLCALL>[{{"name": "lookup", "arguments": {JSON}}}]</TOOLCALL>',
    "tool_calls": f'<tool_calls>\n{{"name": "lookup", "arguments": {JSON}}}\n</tool_calls>',
    "functools": f' functools[{{"name": "lookup", "arguments": {JSON}}}]',
    "muse": '<atem:function_calls>\n<atem:invoke name="lookup">\n<atem:parameter name="q">größe 😀 "x" \\ </b>\n'
    '</atem:parameter>\n<atem:parameter name="n">7</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "gigachat": f'function call<|role_sep|>\n{{"name": "lookup", "arguments": {JSON}}}',
}
every_notation = pytest.mark.parametrize("notation", sorted(NOTATIONS))
