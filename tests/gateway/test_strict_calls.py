"""Strict tools that need not be called: every call that a reader would see is held to its schema, and no text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_forced_templates import COHERE, GIGACHAT, HARMONY, MUSE, SOLAR, TEXTS, THOUGHTS
from test_reply_templates import FORMATS, NAMES, OURS, WRITTEN_BY_US, renderer

from gateway.call_layout import AnswerLayout
from gateway.grammar import Demand, answer_grammar
from gateway.layout_probe import find_layout
from gateway.reply import Reply
from gateway.reply_call_json import JsonNotation
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS, markers
from gateway.reply_parser import StreamParser

LLAMA, QWEN, KIMI, MISTRAL = (
    "meta-llama-Llama-3.1-8B-Instruct",
    "Qwen-Qwen3-0.6B",
    "moonshotai-Kimi-K2",
    "mistralai-Mistral-Nemo-Instruct-2407",
)
KINDS = {name: OURS[name][1] if name in OURS else FORMATS.get(name, WRITTEN_BY_US) for name in [*NAMES, *OURS]}
CALLING = sorted({kinds: name for name, kinds in KINDS.items() if kinds[0] != "none"}.values())  # one of each kind
ODD = [name for name in (LLAMA, HARMONY, SOLAR, COHERE, MUSE, GIGACHAT, QWEN, KIMI, MISTRAL) if name in NAMES]
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": NUMBER}}
    for name in ("lookup", "lookup_all")
)
STRICT = Demand("tools", strict=frozenset({"lookup", "lookup_all"}), free=True)
TOKEN = re.compile(r"<\|?[^\s<>=\"]+\|?>|\[/?[A-Z_]+\]")
SPECIAL = sorted(
    {
        token
        for notation in NOTATIONS.values()
        for thinking in (None, *THINKINGS.values())
        for marker in markers(notation, thinking)
        for token in TOKEN.findall(marker)
    }
    | {"<|message_sep|>"}
)
END = 256
IDS = {token: END + 1 + at for at, token in enumerate(SPECIAL)}
FIND = re.compile("|".join(map(re.escape, sorted(SPECIAL, key=len, reverse=True))))


class Vocabulary:
    """Single bytes, an end, and every marker of any notation as a special token."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END, *IDS.values())
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(token.encode() for token in IDS))

    def __call__(self, text: object) -> list[int]:
        raise TypeError("no text is forced")


TOKENIZER = LLTokenizer(TokenizerWrapper(Vocabulary()))


def split(text: str) -> Iterator[int | str]:
    at = 0
    for match in FIND.finditer(text):
        if at < match.start():
            yield text[at : match.start()]
        yield IDS[match.group()]
        at = match.end()
    if at < len(text):
        yield text[at:]


def unsplit(text: str) -> Iterator[int | str]:
    if text:
        yield text


SPLITS = pytest.mark.parametrize("pieces", [split, unsplit], ids=["special", "plain"])


@cache
def known(name: str) -> tuple[AnswerLayout, Callable[[str], Reply]]:
    """How a template's model answers, and what reads it where answers have a grammar."""
    calls, reasoning = KINDS[name]
    notation, thinking = NOTATIONS[calls], THINKINGS.get(reasoning)
    layout = find_layout(renderer(name), notation, thinking)
    if isinstance(notation, JsonNotation):
        notation = notation.held()
    end = renderer(name).habits.end_before_calls

    def read(text: str) -> Reply:
        parser = StreamParser(thinking, notation, Calls(TOOLS), inside=False, one_call=False, end=end)
        return Reply.of([*parser.feed(text), *parser.finish()])

    return layout, read


@cache
def grammar(name: str, pieces: Callable[[str], Iterator[int | str]]) -> str:
    return answer_grammar(STRICT, TOOLS, known(name)[0], None, pieces)


def accepts(name: str, pieces: Callable[[str], Iterator[int | str]], text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar(name, pieces), log_level=0)
    ids = [token for piece in pieces(text) for token in (piece.encode() if isinstance(piece, str) else [piece])]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@SPLITS
@pytest.mark.parametrize("name", CALLING)
def test_text_is_free_and_calls_are_held(name: str, pieces: Callable[[str], Iterator[int | str]]):
    layout, read = known(name)
    assert layout.openers
    for spelling in (*layout.calls, *filter(None, (layout.bare,))):
        for callee in ("lookup", "lookup_all"):
            good, bad = (spelling.written((callee, {"n": value})) for value in (3, "3 of them"))
            assert accepts(name, pieces, good), good
            assert [(call.name, call.value()) for call in read(good).calls] == [(callee, {"n": 3})]
            assert not accepts(name, pieces, bad), bad
        other = spelling.written(("other", {"n": 3}))
        assert accepts(name, pieces, other) == (
            not read(other).calls
        )  # what names no tool is a call by its marker
    said = TEXTS.get(name, "")
    thought = THOUGHTS.get(name, "")
    for text in ("", "I cannot. {} [] <x>\n", '{"name": "Ann", "n": "3"}', '[{"name": "lookup"}]', "lookup{\n"):
        assert accepts(name, pieces, thought + said + text), text
    call = layout.calls[0].written(("lookup", {"n": 3}))
    if layout.bare is None:
        assert accepts(name, pieces, thought + call)


@pytest.mark.parametrize("name", [name for name in (QWEN, "gemma", "qwen xml") if name in KINDS])
@SPLITS
def test_a_call_inside_reasoning_is_held_too(name: str, pieces: Callable[[str], Iterator[int | str]]):
    layout, read = known(name)
    opened = THINKINGS[KINDS[name][1]].open
    for value, fits in ((3, True), ("x", False)):
        text = f"{opened}I wonder.\n" + layout.calls[0].written(("lookup", {"n": value}))
        assert len(read(text).calls) == 1
        assert accepts(name, pieces, text) == fits


@pytest.mark.skipif(LLAMA not in NAMES, reason="the shared data folder is not here")
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "lookup", "parameters": {"n": 3}}', True),
        ('\n { "type" : "function",\n"name" :"lookup" , "parameters":{"n":3} }', True),
        ('<|python_tag|>{"name": "lookup", "parameters": {"n": 3}}', True),
        ('{"name": "lookup", "parameters": {"n": "3"}}', False),
        ('{"type": "function", "name": "lookup", "parameters": {}}', False),
        ('{"name": "lookup"}', False),
        ('{"name": "look"}', True),
        ('{"name": "lookup_more", "parameters": {}}', True),
        ('{"parameters": {"n": 3}}', True),
        ('Call {"name": "lookup", "parameters": {}}', True),
        ('{"names": ["lookup"]}', True),
        ("{", True),
    ],
)
def test_a_bare_object_is_a_call_by_the_name_it_begins_with(text: str, fits: bool):
    assert accepts(LLAMA, split, text) == fits


@pytest.mark.skipif(LLAMA not in NAMES, reason="the shared data folder is not here")
@pytest.mark.parametrize(
    "text",
    [
        '{"parameters": {"n": "x"}, "name": "lookup"}',
        '{"n\\u0061me": "lookup", "parameters": {}}',
        '{"name": "l\\u006fokup", "parameters": {}}',
        '{"id": "1", "name": "lookup", "parameters": {}}',
        '{"tool_name": "lookup", "parameters": {}}',
    ],
)
def test_what_is_not_held_is_no_call(text: str):
    assert accepts(LLAMA, split, text)
    reply = known(LLAMA)[1](text)
    assert (reply.calls, reply.text) == ((), text)


def fragments(name: str) -> st.SearchStrategy[str]:
    """Texts made of what means something in a model's answers, and of what nearly does."""
    layout = known(name)[0]
    calls = [
        spelling.written((callee, {"n": value}))
        for spelling in (*layout.calls, *filter(None, (layout.bare,)))
        for callee in ("lookup", "lookup_all", "other")
        for value in (3, "x")
    ]
    cut = st.sampled_from(calls).flatmap(lambda call: st.integers(1, len(call)).map(lambda at: call[:at]))
    small = ["{", '{"', '"name": "', "lookup", "a", "\n", " ", '"}', "}", ", ", "n", "function call"]
    words = st.sampled_from([*small, *sorted(layout.markers)])
    return st.lists(st.one_of(words, st.sampled_from(calls), cut), max_size=5).map("".join)


@SPLITS
@pytest.mark.parametrize("name", ODD)
def test_no_call_gets_past_the_grammar_and_nothing_else_is_stopped(
    name: str, pieces: Callable[[str], Iterator[int | str]]
):
    layout, read = known(name)

    @settings(max_examples=30, deadline=None)
    @given(fragments(name))
    def check(text: str) -> None:
        reply = read(text)
        if accepts(name, pieces, text):
            for call in reply.calls:
                assert call.name in ("lookup", "lookup_all")
                value = call.value()
                assert list(value) == ["n"]
                assert isinstance(value["n"], int)
        elif not any(opener in text for opener in layout.openers) and layout.bare is None:
            raise AssertionError("text without a call is stopped")

    check()


def test_a_tool_that_cannot_be_followed_leaves_the_others_held():
    layout = known("gemma")[0]
    odd: dict[str, Any] = json.loads(json.dumps(TOOLS[1]))
    odd["function"]["parameters"]["properties"]["n"]["not"] = {"const": 3}
    held = answer_grammar(STRICT, (TOOLS[0], odd), layout, None, unsplit)
    for callee, fits in (("lookup", False), ("lookup_all", False)):
        matcher = LLMatcher(TOKENIZER, held, log_level=0)
        text = layout.calls[0].written((callee, {"n": "x"}))
        assert all(matcher.consume_token(byte) for byte in text.encode()) == fits
