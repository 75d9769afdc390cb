"""Answers taken apart: calls in every notation, reasoning, and what only looks like them, however the text is cut."""

from __future__ import annotations

import json
from typing import Any, get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ReasoningFormat, ToolCallFormat
from gateway.reply import Call, CallArguments, CallEnd, CallStart, Part, Reply, merged
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_parser import StreamParser
from gateway.reply_scanner import Markers

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


def test_every_notation_can_be_set_and_is_tried_here():
    assert set(WRITTEN) == set(NOTATIONS)
    assert set(get_args(ToolCallFormat)) == {"auto", "none", *NOTATIONS}
    assert set(get_args(ReasoningFormat)) == {"auto", "none", *THINKINGS}


@every_notation
def test_a_call_is_read(notation: str):
    reply = read(WRITTEN[notation], notation)
    assert calls(reply) == ONE
    assert (reply.text, reply.reasoning) == ("", "")


@every_notation
def test_text_before_a_call_stays_and_blanks_between_them_go(notation: str):
    if NOTATIONS[notation].bare:
        pytest.skip("such a call has no text before it")
    reply = read(f"  Let me look.\n\n{WRITTEN[notation]}", notation)
    assert calls(reply) == ONE
    assert reply.text == "  Let me look."


@every_notation
def test_calls_may_be_many(notation: str):
    between = "; " if NOTATIONS[notation].bare else "\n"
    assert calls(read(between.join([WRITTEN[notation]] * 3), notation)) == ONE * 3


@every_notation
def test_one_call_is_enough_where_one_is_allowed(notation: str):
    reading = parser(notation, one_call=True)
    parts = reading.feed(f"{WRITTEN[notation]}\n{WRITTEN[notation]}")
    parts += reading.finish()
    assert reading.done or NOTATIONS[notation].closers == ()
    assert calls(Reply.of(parts)) == ONE


@every_notation
def test_an_answer_that_is_cut_off_keeps_what_there_is(notation: str):
    text = WRITTEN[notation]
    for end in range(len(text)):
        reply = read(text[:end], notation)
        if reply.calls:
            assert reply.text.strip() == ""
            assert reply.calls[0].name in "lookup"
            begun = "".join(reply.calls[0].arguments.split())
            assert len(reply.calls) == 1
            whole = "".join(parse_arguments(text, notation).split())
            assert whole.startswith(begun)
        else:
            assert reply.text.strip() in text


def parse_arguments(text: str, notation: str) -> str:
    return Reply.of(parse(text, notation)).calls[0].arguments


@every_notation
def test_arguments_come_before_the_call_has_ended(notation: str):
    text = WRITTEN[notation].replace("größe", "a" * 200)
    at = text.index("a" * 200) + 150
    assert "a" * 140 in Reply.of(parser(notation).feed(text[:at])).calls[0].arguments


@given(st.data())
def test_text_of_marker_pieces_reads_the_same_however_it_is_cut(data: st.DataObject):
    """Whatever comes out, it does not depend on the cuts, every call is closed, and no letter is lost from text."""
    notation = data.draw(st.sampled_from(sorted(NOTATIONS)))
    thinking = data.draw(st.sampled_from([None, "think", "gemma4", "harmony", "muse"]))
    inside = thinking is not None and data.draw(st.booleans())
    written = WRITTEN[notation]
    words = ["hi", " ", "\n", "{", "}", '"', "[", "<", "x: 1,", written, "<think>", "</think>", "é😀"]
    cut = st.integers(0, len(written)).map(lambda at: written[:at])
    rest = st.integers(0, len(written)).map(lambda at: written[at:])
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(words), cut, rest), max_size=8)))
    whole = parse(text, notation, thinking, inside=inside)
    reading = parser(notation, thinking, inside=inside)
    parts: list[Part] = []
    at = 0
    while at < len(text):
        size = data.draw(st.integers(1, 12))
        parts += reading.feed(text[at : at + size])
        at += size
    parts += reading.finish()
    assert well_formed(parts) == whole


@given(st.text(alphabet='ab<>tool_call{}"\\ \n[]:,', max_size=60))
def test_text_without_calls_is_given_out_whole(text: str):
    for notation in ("hermes", "qwen_xml", "llama", "mistral", "gemma4"):
        reply = read(text, notation)
        if not reply.calls:
            assert reply.text == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\nnot json</tool_call> and more",
        '<tool_call>{"nme": "lookup"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "loo',
        "Use <tool_call> to call, as in <tool_call>...</tool_call>.",
        "a < b, <tool, <tool_cal",
        "ends with blanks \n\n",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str):
    assert read(text, "hermes") == Reply(text)


def test_a_call_behind_something_that_looked_like_one_is_read():
    reply = read(f"<tool_call> is a tag. {WRITTEN['hermes']}", "hermes")
    assert calls(reply) == ONE
    assert reply.text == "<tool_call> is a tag."


@pytest.mark.parametrize(
    ("notation", "text", "rest"),
    [
        (
            "qwen_xml",
            "<tool_call>\n<function=lookup>\n</function>\n<function=not {one}> so much",
            "not {one}> so much",
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>\n<|tool_call_argument_begin|>so much",
            "<|tool_call_argument_begin|>so much",
        ),
    ],
)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_what_is_no_call_behind_one_keeps_its_text(notation: str, text: str, rest: str, step: int):
    start, arguments, end, *said = parse(text, notation, step=step)
    assert (start, arguments, end) == (CallStart(0, "", "lookup"), CallArguments(0, "{}"), CallEnd(0))
    assert [part.text for part in said] == [rest]


def test_a_closer_that_is_left_over_is_dropped_and_one_in_later_text_stays():
    reply = read(f"{WRITTEN['hermes']}</tool_call>\nIt ends with </tool_call>, or </tool_ca", "hermes")
    assert reply.text == "It ends with </tool_call>, or </tool_ca"
    assert calls(reply) == ONE


def test_text_behind_a_call_is_kept_apart_from_text_before_it():
    reply = read(f"Before.\n\n{WRITTEN['hermes']}\n\nAfter.", "hermes")
    assert reply.text == "Before.\n\n\n\nAfter."
    assert calls(reply) == ONE


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


@pytest.mark.parametrize("thinking", ["think", "gemma4", "mistral", "seed", "apertus", "cohere"])
def test_reasoning_is_taken_out(thinking: str):
    marks = THINKINGS[thinking]
    text = f"{marks.open}\nI wonder.\n\nYes.\n{marks.close}\n\nThe answer. "
    assert read(text, "hermes", thinking) == Reply("The answer. ", "I wonder.\n\nYes.")
    opened = text.removeprefix(marks.open)
    assert read(opened, None, thinking, inside=True) == Reply("The answer. ", "I wonder.\n\nYes.")
    assert read(text, None, thinking, inside=True) == Reply("The answer. ", "I wonder.\n\nYes.")


def test_reasoning_may_be_empty_or_never_end():
    assert read("<think>\n\n</think>\n\nYes.", "hermes", "think") == Reply("Yes.")
    assert read("I wonder", "hermes", "think", inside=True) == Reply("", "I wonder")
    assert read("", "hermes", "think", inside=True) == Reply()


def test_reasoning_in_the_middle_of_text_is_text():
    assert read("The tag <think> opens it.", "hermes", "think") == Reply("The tag <think> opens it.")


def test_reasoning_between_calls_is_joined():
    text = f"<think>one</think>{WRITTEN['hermes']}<think>two</think>{WRITTEN['hermes']}done"
    reply = read(text, "hermes", "think")
    assert (reply.reasoning, reply.text, calls(reply)) == ("one\n\ntwo", "done", ONE * 2)


def test_a_call_ends_reasoning_that_was_left_open():
    reply = read(f"I must look.\n{WRITTEN['hermes']}", "hermes", "think", inside=True)
    assert (reply.reasoning, reply.text, calls(reply)) == ("I must look.", "", ONE)
    reply = read("I could use <tool_call> here.</think>Yes.", "hermes", "think", inside=True)
    assert reply == Reply("Yes.", "I could use <tool_call> here.")


def test_blanks_before_an_answer_that_goes_on_are_kept():
    for notation in (None, "hermes", "llama", "qwen_xml"):
        assert read(" and so on", notation, "think") == Reply(" and so on")


def test_channels_of_harmony():
    text = (
        "<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"n": 1}'
    )
    reply = read(text, "harmony", "harmony")
    assert (reply.reasoning, reply.text, calls(reply)) == ("I wonder.", "Wait.", [("lookup", {"n": 1})])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read(text, "harmony", "harmony") == Reply("Yes.", "Hm.")


def test_text_is_not_held_back_for_nothing():
    reading = parser("hermes", "think")
    assert Reply.of(reading.feed("a <b> <tool")).text == "a <b>"
    assert Reply.of(reading.feed("s>")).text == " <tools>"
    assert Reply.of(parser(None, "think").feed("a \n")).text == "a \n"


def test_no_marker_begins_another_one():
    for notation in NOTATIONS.values():
        for thinking in (None, *THINKINGS.values()):
            found = [
                *notation.openers,
                *notation.closers,
                *((thinking.open, *thinking.silent) if thinking else ()),
            ]
            for one in set(found):
                assert not any(other.startswith(one) for other in set(found) - {one})


@given(st.text(alphabet="<to>x", max_size=20))
def test_markers_are_found_where_they_stand_first(text: str):
    at, marker = Markers(("<to>", "x>")).find(text, 0)
    places = [text.find(m) for m in ("<to>", "x>") if m in text]
    if places:
        assert at == min(places)
        assert text.startswith(marker, at)
    else:
        assert marker == ""
        assert text[at:] in ("", "<", "<t", "<to", "x")


def test_what_a_model_calls_with_can_be_written_again():
    call = Call("call_1", "lookup", '{"q": "\\ud83d", "n": 12345678901234567890123}')
    assert orjson.loads(orjson.dumps(call.value())) == {"q": "\ufffd", "n": 12345678901234567890123.0}
    started, fragment = Calls((TOOL,)).start("a\ud83d"), Calls((TOOL,)).arguments('{"q": "\ud83d"}')
    assert orjson.dumps([started.name, fragment.fragment])


MUSE_HEADS = (
    " to=self<|message|>Hm.<|eom|><|start|>assistant",
    f" to=lookup<|message|>{WRITTEN['muse']}",
    f"<|eom|><|start|>assistant to=lookup<|message|>{WRITTEN['muse']}",
    "<|eom|><|start|>assistant to=user<|message|> Found.",
)


def test_parts_have_headers_that_are_no_text():
    reply = read("".join(MUSE_HEADS), "muse", "muse")
    assert (reply.reasoning, reply.text, calls(reply)) == ("Hm.", "Found.", ONE * 2)
    assert read(" to=user<|message|>Write to=x or to=<b>.", "muse", "muse") == Reply("Write to=x or to=<b>.")
    assert read(" to=nobody knows", "muse", "muse") == Reply(" to=nobody knows")


PART_END = "<|message_sep|>"


@pytest.mark.parametrize("notation", ["gigachat", None])
def test_behind_the_end_of_a_part_only_a_call_goes_on(notation: str | None):
    reading = parser(notation, end=PART_END)
    parts = reading.feed(f"Hello.{PART_END}\n\nuser<|role_sep|>\nMe again")
    assert reading.done
    assert Reply.of([*parts, *reading.finish()]) == Reply("Hello.")
    assert read(f"Hello.{PART_END}", notation, end=PART_END) == Reply("Hello.")
    called = f"I look.{PART_END}\n\n{WRITTEN['gigachat']}{PART_END}\n\nfunction result<|role_sep|>\nmade up"
    reply = read(called, notation, end=PART_END)
    assert (reply.text, calls(reply)) == ("I look.", ONE if notation else [])
