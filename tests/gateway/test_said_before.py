"""What was parsed before is what parsing gives again, for the same owner only."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import JsonObject
from gateway.said_before import SaidBefore
from gateway.template_env import to_json
from protocol.errors import RequestError

texts = st.text("ab \n", max_size=40)
calls = st.builds(
    lambda number, text: {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": f"c{number}", "function": {"name": "f", "arguments": f'{{"x": {number}}}'}}],
    },
    st.integers(0, 2),
    texts,
)
said = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), texts
)
parts = st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, texts)
turns = st.lists(said | parts | calls, min_size=1, max_size=5)


def through(memory, owner="", size=1000):
    return lambda items, parse: memory.parsed(owner, size, items, parse)


@given(st.lists(st.tuples(st.integers(0, 5), turns, st.sampled_from(["one", "two"])), min_size=1, max_size=8))
def test_a_history_known_in_part_gives_what_parsing_it_whole_does(sent):
    memory, history = SaidBefore(), []
    for kept, new, owner in sent:
        history = [*history[:kept], *new]
        items = copy.deepcopy(history)
        assert parse_messages(items, through=through(memory, owner)) == parse_messages(items)


def test_only_what_is_new_is_parsed_and_nothing_for_another_owner():
    memory, parsed = SaidBefore(), []

    def counting(owner):
        def run(items, parse):
            return memory.parsed(owner, 1000, items, lambda at: (parsed.append(at), parse(at))[1])

        return run

    history = [{"role": "user", "content": f"{number}"} for number in range(6)]
    first = parse_messages(history, through=counting("one"))
    longer = [*copy.deepcopy(history), {"role": "user", "content": "more"}]
    second = parse_messages(longer, through=counting("one"))
    assert parsed == [*range(6), 5, 6]
    assert all(again is before for again, before in zip(second[:5], first[:5], strict=True))
    edited = [*longer[:3], {"role": "user", "content": "other"}, *longer[4:]]
    parse_messages(edited, through=counting("one"))
    assert parsed[8:] == [*range(3, 7)]
    parse_messages(longer, through=counting("two"))
    assert parsed[12:] == [*range(7)]


def test_the_last_message_is_never_taken_from_before():
    memory = SaidBefore()
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a "}]
    parse_messages([*history, {"role": "user", "content": "r"}], through=through(memory))
    assert parse_messages(history, through=through(memory))[-1].content == "a "


def test_marks_that_move_are_seen():
    memory = SaidBefore()
    marked = {"role": "user", "content": "q", "cache_control": {"type": "ephemeral"}}
    plain = {"role": "user", "content": "q"}
    tail = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    assert parse_messages([marked, *tail], through=through(memory))[0].mark_seconds > 0
    assert parse_messages([plain, *tail], through=through(memory))[0].mark_seconds == 0


def test_a_refused_message_is_named_by_its_place_behind_known_ones():
    memory = SaidBefore()
    history = [{"role": "user", "content": "q"}] * 4
    parse_messages(history, through=through(memory))
    with pytest.raises(RequestError, match=r"messages\.4\.role"):
        parse_messages([*history, {"role": "nobody", "content": ""}], through=through(memory))


def test_memory_is_bounded():
    memory = SaidBefore(max_bytes=100_000)
    for number in range(50):
        history = [{"role": "user", "content": f"{number}"}] * 3
        parse_messages(history, through=through(memory, size=5_000))
        memory.same_tools("", tuple(parse_tools([{"function": {"name": f"f{number}", "description": "x" * 900}}])))
    assert 0 < memory.held_bytes <= 2 * 100_000


def test_equal_tools_are_the_same_objects_and_written_once(monkeypatch):
    memory = SaidBefore()
    listed = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    first = memory.same_tools("one", parse_tools(copy.deepcopy(listed)))
    assert memory.same_tools("one", parse_tools(copy.deepcopy(listed)))[0] is first[0]
    assert memory.same_tools("two", parse_tools(copy.deepcopy(listed)))[0] is not first[0]
    listed[0]["function"]["name"] = "g"
    assert memory.same_tools("one", parse_tools(listed))[0] is not first[0]
    assert to_json(first[0]) is to_json(first[0])


@pytest.mark.parametrize(
    "layout",
    [{}, {"indent": 2}, {"separators": [",", ":"]}, {"sort_keys": True, "ensure_ascii": True}, {"indent": 4}],
)
def test_a_clients_object_is_written_as_any_other_in_each_layout(layout):
    plain = {"b": [1, {"é": None}], "a": 1.5}
    kept = JsonObject(plain)
    assert to_json(kept) == to_json(plain)
    assert to_json(kept, **layout) == to_json(plain, **layout)
    assert to_json(kept, **layout) == to_json(kept, **layout)
    assert kept == plain


def called_with(arguments):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("one", "other"), [({"x": 1}, {"x": True}), ({"x": 1}, {"x": 1.0}), ({"x": 1, "y": 2}, {"y": 2, "x": 1})]
)
def test_what_python_calls_equal_and_json_does_not_is_told_apart(one, other):
    memory = SaidBefore()
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    for wrap in (called_with, lambda arguments: legacy | {"function_call": {"name": "f", "arguments": arguments}}):
        for arguments in (one, other):
            history = [{"role": "user", "content": "q"}, wrap(arguments), *[{"role": "user", "content": "r"}] * 3]
            said = parse_messages(history, through=through(memory))
            assert to_json(said[1].tool_calls[0].arguments) == to_json(arguments)
    for default in (one, other):
        schema = {"type": "object", "properties": {}, "default": default}
        [tool] = memory.same_tools("", parse_tools([{"function": {"name": "f", "parameters": schema}}]))
        assert to_json(tool["function"]["parameters"]) == to_json(schema)


def test_fields_that_nobody_reads_may_be_anything():
    odd = {"role": "user", "content": "q", "tool_calls": 5, "function_call": [1]}
    history = [odd, {"role": "assistant", "content": "a", "tool_calls": [], "function_call": 7}, odd, odd]
    assert len(parse_messages(history, through=through(SaidBefore()))) == len(history)
