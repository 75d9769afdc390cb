"""What was parsed of Anthropic's messages before is what parsing gives again, with what they say of tools."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic_input import parse_messages
from gateway.anthropic_tools import parse_tools
from gateway.conversation import Message
from gateway.said_before import SaidBefore
from gateway.template_env import to_json

TOOLS = [
    {"name": name, "description": name, "input_schema": {"type": "object"}, "defer_loading": name != "shown"}
    for name in ("shown", "one", "two")
]
texts = st.text("ab ", max_size=5)
said = st.builds(
    lambda role, text: {"role": role, "content": [{"type": "text", "text": text}]},
    st.sampled_from(["user", "assistant"]),
    texts,
)
called = st.builds(
    lambda value, text: {
        "role": "assistant",
        "content": [
            {"type": "text", "text": text},
            {"type": "tool_use", "id": "c", "name": "shown", "input": value},
        ],
    },
    st.sampled_from([{"x": 1}, {"x": True}, {"x": 1.0}, {"x": 1, "y": 2}, {"y": 2, "x": 1}, {}]),
    texts,
)
results = st.builds(
    lambda text: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": text}]}, texts
)
found = st.builds(
    lambda name, text: {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [{"type": "tool_reference", "tool_name": name}],
            },
            {"type": "text", "text": text},
        ],
    },
    st.sampled_from(["one", "two"]),
    texts,
)
turns = st.lists(said | called | results | found, min_size=1, max_size=5)


def parsed(history: list[Any], memory: SaidBefore[tuple[Message, ...]] | None) -> tuple[Any, ...]:
    tools = parse_tools(TOOLS)
    through = None if memory is None else lambda *work: memory.parsed("", 1000, *work)
    try:
        messages = parse_messages("Be brief.", history, tools, through=through)
    except Exception as error:
        return (f"{error}",)
    arguments = [to_json(call.arguments) for message in messages for call in message.tool_calls]
    return messages, arguments, tools.loaded


@given(st.lists(st.tuples(st.integers(0, 6), turns, st.booleans()), min_size=1, max_size=6))
def test_a_history_known_in_part_gives_what_parsing_it_whole_does(sent: Any):
    memory: SaidBefore[tuple[Message, ...]] = SaidBefore()
    history: list[Any] = []
    for kept, new, copied in sent:
        history = [*history[:kept], *new]
        items = copy.deepcopy(history) if copied else history
        assert parsed(list(items), memory) == parsed(items, None)


def test_calls_are_known_by_the_objects_they_are():
    memory: SaidBefore[tuple[Message, ...]] = SaidBefore()
    call = {"type": "tool_use", "id": "c", "name": "shown", "input": {"x": 1}}
    history: list[Any] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [call]}] * 2
    history += [{"role": "user", "content": f"{number}"} for number in range(3)]
    first = parsed(history, memory)[0]
    again = parsed([*history, {"role": "user", "content": "more"}], memory)[0]
    assert all(one is other for one, other in zip(first[1:7], again[1:7], strict=True))
    others = parsed(copy.deepcopy(history), memory)[0]
    assert not any(one is other for one, other in zip(first[1:], others[1:], strict=True))
    assert others == first


@pytest.mark.parametrize("block", [{"type": "tool_reference", "tool_name": "one"}])
def test_a_message_that_brings_in_tools_does_so_each_time(block: dict[str, Any]):
    memory: SaidBefore[tuple[Message, ...]] = SaidBefore()
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    history: list[Any] = [{"role": "assistant", "content": "a"}, {"role": "user", "content": [result]}]
    history += [{"role": "user", "content": f"{number}"} for number in range(3)]
    for _ in range(2):
        assert [tool["function"]["name"] for tool in parsed(history, memory)[2]] == ["one"]
