"""Answers taken apart: calls in every notation, and what only looks like them, however the text is cut."""

from __future__ import annotations

from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reply_rig import ONE, TOOL, WRITTEN, calls, every_notation, parse, parser, read, well_formed

from gateway.config import ReasoningFormat, ToolCallFormat
from gateway.reply import Call, CallArguments, CallEnd, CallStart, Part, Reply
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_scanner import Markers


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
