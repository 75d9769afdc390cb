"""Grammars of arguments without quotes around keys: what a schema allows is accepted and read back, nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from test_answer_grammar import FORCED, TOKENIZER, accepts, pieces

from gateway.call_layout import AnswerLayout, Bare, CallLayout
from gateway.grammar import Demand, answer_grammar
from gateway.reply import Reply
from gateway.reply_call_gemma import QUOTE
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS
from gateway.reply_parser import StreamParser
from protocol.errors import RequestError

BARE = CallLayout("<|tool_call>call:", "", "<tool_call|>", Bare(QUOTE, ordered=False))
SORTED = CallLayout("<|tool_call>call:", "", "<tool_call|>", Bare(QUOTE, ordered=True))
MARKED = CallLayout("call:", "", "", Bare("<mark>", ordered=False))  # quotes that are a token of their own
STRICT = frozenset({"act"})
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        "ratio": {"type": ["number", "null"]},
        "mode": {"enum": ["read", "write", 3, None, True]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": {"$ref": "#/$defs/place"},
        "either": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]},
        "odd key": {"const": {"a": ["x", 1.5]}},
    },
    "required": ["path", "where"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "inner": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
WORDS = st.text(alphabet="aZ é日😀\"'\\{}[]:,.\n\t<|>-1", max_size=12).filter(lambda text: QUOTE not in text)


def grammar(schema: dict[str, Any], layout: CallLayout = BARE, strict: frozenset[str] = STRICT) -> str:
    tool = {"type": "function", "function": {"name": "act", "description": "", "parameters": schema}}
    return answer_grammar(Demand(FORCED, strict=strict), [tool], AnswerLayout((layout,)), None, pieces)


def in_order(place: dict[str, Any]) -> dict[str, Any]:
    return {key: place[key] for key in ("x", "inner")}


def places() -> st.SearchStrategy[dict[str, Any]]:
    numbers = st.integers(-9, 9) | st.floats(-1e6, 1e6)
    leaf = st.fixed_dictionaries({"x": numbers})
    return st.recursive(
        leaf, lambda inner: st.fixed_dictionaries({"x": numbers, "inner": inner}).map(in_order), max_leaves=3
    )


FITTING = st.fixed_dictionaries(
    {"path": WORDS},
    optional={
        "depth": st.integers(0, 9),
        "ratio": st.floats(-1e6, 1e6) | st.none(),
        "mode": st.sampled_from(["read", "write", 3, None, True]),
        "tags": st.lists(WORDS, max_size=2),
    },
).flatmap(
    lambda first: st.fixed_dictionaries(
        {"where": places()},
        optional={
            "either": st.booleans() | st.lists(st.integers(-99, 99), min_size=1, max_size=3),
            "odd key": st.just({"a": ["x", 1.5]}),
        },
    ).map(lambda second: first | second)
)


@settings(max_examples=40, deadline=None)
@given(FITTING)
def test_what_fits_the_schema_is_accepted_and_read_back(arguments: dict[str, Any]):
    arguments = {key: arguments[key] for key in SCHEMA["properties"] if key in arguments}
    text = BARE.written(("act", arguments))
    assert accepts(ACTING, text)
    parser = StreamParser(None, NOTATIONS["gemma4"], Calls(), inside=False, one_call=False)
    (call,) = Reply.of([*parser.feed(text), *parser.finish()]).calls
    assert (call.name, call.value()) == ("act", arguments)


ACTING = grammar(SCHEMA)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"path": "x"},
        {"path": 3, "where": {"x": 1}},
        {"path": "x", "depth": 10, "where": {"x": 1}},
        {"path": "x", "mode": "append", "where": {"x": 1}},
        {"path": "x", "tags": ["a", "b", "c"], "where": {"x": 1}},
        {"path": "x", "where": {"y": 1}},
        {"path": "x", "where": {"x": 1, "inner": {}}},
        {"path": "x", "where": {"x": 1}, "either": []},
        {"path": "x", "where": {"x": 1}, "other": 1},
    ],
    ids=json.dumps,
)
def test_what_does_not_fit_is_not(arguments: dict[str, Any]):
    assert not accepts(ACTING, BARE.written(("act", arguments)))


def test_keys_are_in_the_order_that_the_template_has():
    text = SORTED.written(("act", {"where": {"x": 1}, "path": "p", "depth": 3}))
    assert "{depth:3,path:" in text
    assert accepts(grammar(SCHEMA, SORTED), text)
    assert not accepts(ACTING, text)


def test_anything_goes_where_the_schema_says_nothing():
    free = grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    rest = {"deep": {"list": [1, "a", None, {"x": []}], "on": False}, "text": "t"}
    assert accepts(free, BARE.written(("act", {"n": 1, **rest})))
    assert not accepts(free, BARE.written(("act", {**rest})))
    assert not accepts(free, "<|tool_call>call:act{n:1,n:2}<tool_call|>")
    assert accepts(grammar({"type": "object"}), BARE.written(("act", {})))
    assert accepts(
        grammar({"type": "object", "additionalProperties": {"type": "null"}}),
        "<|tool_call>call:act{a:null,b:null}<tool_call|>",
    )


def test_strings_are_counted_where_their_quotes_are_tokens():
    schema = {"type": "object", "properties": {"q": {"type": "string", "minLength": 2, "maxLength": 3}}}
    made = grammar(schema, MARKED, frozenset())
    for text, fits in (("a", False), ("é1", True), ("abc", True), ("abcd", False)):
        matcher = LLMatcher(TOKENIZER, made, log_level=0)
        ids = [*b"call:act{q:", 257, *text.encode(), 257, *b"}"]
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == fits, text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "a+"}, r"\(q\).*pattern"),
    ({"type": "string", "format": "date"}, r"\(q\).*format"),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "oneOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "properties": {"in": {"type": "object", "minProperties": 1}}}, r"q\.in.*minProperties"),
    ({"type": "array", "items": {"not": {}}}, r"q\[\].*not"),
    ({"$ref": "#/$defs/none"}, "not found"),
    ({"type": "strin"}, "no type"),
    ({"enum": [f"a{QUOTE}b"]}, "no value can hold"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_strict_arguments_cannot_be_held_to_is_refused_by_its_place(schema: dict[str, Any], reason: str):
    with pytest.raises(RequestError, match=f"tool_choice: the parameters of 'act' .*{reason}") as refused:
        grammar({"type": "object", "properties": {"q": schema}})
    assert refused.value.param == FORCED


@pytest.mark.parametrize("schema", [schema for schema, _ in REFUSED[:6]])
def test_others_are_followed_as_far_as_can_be(schema: dict[str, Any]):
    made = grammar({"type": "object", "properties": {"q": schema}}, strict=frozenset())
    assert accepts(made, BARE.written(("act", {})))
    assert not accepts(made, "<|tool_call>call:act{q:}<tool_call|>")
