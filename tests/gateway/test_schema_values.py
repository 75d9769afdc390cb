"""Schemas that no finite value fits are refused by their field; parts of one that none fits are never begun."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from test_answer_grammar import BARE, JSON, TAGS, pieces

from gateway.call_layout import AnswerLayout
from gateway.grammar import Demand, answer_grammar
from gateway.schema_values import MAX_DEPTH, Endless, ending
from protocol.errors import RequestError

BYTES = LLTokenizer("byte")


def ref(path: str = "") -> dict[str, Any]:
    return {"$ref": f"#{path}"}


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


def joint(*parts: Any) -> dict[str, Any]:
    return {"allOf": list(parts)}


def either(*parts: Any) -> dict[str, Any]:
    return {"anyOf": list(parts)}


def listed(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def chain(length: int) -> dict[str, Any]:
    parts = {f"d{at}": record("a", a=ref(f"/$defs/d{at + 1}")) for at in range(length)}
    return record("x", x=ref("/$defs/d0")) | {"$defs": parts | {f"d{length}": {"type": "null"}}}


NULL = {"type": "null"}
NODE = ref("/$defs/node")
ENDLESS: dict[str, dict[str, Any]] = {
    "a property of itself": record("a", a=ref("/properties/a")),
    "a property of the whole": record("a", a=ref()),
    "in turns": record("a", a=ref("/$defs/b"))
    | {"$defs": {"b": record("c", c=ref("/$defs/c")), "c": record("b", b=ref("/$defs/b"))}},
    "references alone": record("a", a=ref("/$defs/b")) | {"$defs": {"b": ref("/$defs/c"), "c": ref("/$defs/b")}},
    "every branch": record("a", a=either(ref(), listed(ref(), minItems=1))),
    "one of the branches": record("a", a={"oneOf": [ref(), ref("/properties/a")]}),
    "one part of many": record("a", a=joint({"type": "object"}, ref())),
    "a part beside": record("a", a=joint(NODE, record("next", next=ref("/properties/a"))))
    | {"$defs": {"node": {"type": "object"}}},
    "a type that has none": record("a", a={"type": ["object", "array"], "minItems": 1, "items": ref(), **NODE})
    | {"$defs": {"node": {"type": "array"}}},
    "an item": record("a", a=listed(ref("/properties/a"), minItems=2)),
    "the second item": record("a", a={"type": "array", "prefixItems": [NULL, ref()], "minItems": 2}),
    "the second item, as it was": record("a", a={"type": "array", "items": [NULL, ref()], "minItems": 2}),
    "any property": {"type": "object", "required": ["a"], "additionalProperties": ref()},
    "enough properties": record(a=ref()) | {"minProperties": 1, "additionalProperties": False},
    "a name with a slash": record("a/b", **{"a/b": ref("/properties/a~1b")}),
    "a branch by number": record("a", a=either(ref("/properties/a/anyOf/0"))),
}
ENDING: dict[str, dict[str, Any]] = {
    "a tree": record("node", node=NODE) | {"$defs": {"node": record("below", below=listed(NODE))}},
    "a list": record("next", next=either(ref(), NULL)),
    "a list of types": record("next", next={"type": ["object", "null"], **{"required": ["next"]}}),
    "an optional one": record(a=ref()),
    "a value that is given": record("a", a={"const": {"b": 1}, "properties": {"b": ref()}, "required": ["b"]}),
    "what is not understood": record("a", a={"$ref": "https://example.com/a", "$anchor": "b"}),
    "nothing there": record("a", a=ref("/nowhere/3")),
    "shared parts": record("a b", a=NODE, b=NODE) | {"$defs": {"node": {"type": "integer"}}},
    "a depth that is followed": chain(100),
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=list(ENDLESS))
@pytest.mark.parametrize("layout", [JSON, BARE, TAGS], ids=["json", "bare", "tags"])
def test_a_schema_without_a_finite_value_is_refused_by_its_field(schema: dict[str, Any], layout: Any):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    for demand, tools in ((Demand("response_format", schema), ()), (Demand("tool_choice"), (tool,))):
        with pytest.raises(RequestError, match="cannot be followed: it has no value that ends") as refused:
            answer_grammar(demand, tools, AnswerLayout((layout,)), None, pieces)
        assert refused.value.param == demand.field


@pytest.mark.parametrize("schema", ENDING.values(), ids=list(ENDING))
def test_a_schema_with_one_stays_as_it_is(schema: dict[str, Any]):
    assert ending(schema) is schema


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        (record(a=ref("/properties/a"), b=NULL), record(a=False, b=NULL)),
        (record("a", a=either(ref("/properties/a/anyOf/0"), NULL)), record("a", a=either(False, NULL))),
        (record("a", a=listed(ref("/properties/a/items"))), record("a", a=listed(False))),
        (
            record(a=NODE) | {"$defs": {"node": record("b", b=NODE)}},
            record(a=False) | {"$defs": {"node": False}},
        ),
    ],
)
@pytest.mark.parametrize("layout", [JSON, BARE, TAGS], ids=["json", "bare", "tags"])
def test_parts_without_one_are_taken_out(schema: dict[str, Any], left: dict[str, Any], layout: Any):
    assert ending(schema) == left
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    assert answer_grammar(
        Demand("tool_choice", strict=frozenset("f")), (tool,), AnswerLayout((layout,)), None, pieces
    )


@pytest.mark.parametrize("length", [MAX_DEPTH, 9_000])
def test_references_that_lead_too_far_are_refused_before_the_library_sees_them(length: int):
    schema = chain(length)
    with pytest.raises(RequestError, match="lead down more than") as refused:
        answer_grammar(Demand("response_format", schema), (), AnswerLayout((JSON,)), None, pieces)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("layout", [JSON, BARE, TAGS], ids=["json", "bare", "tags"])
def test_what_is_deep_but_followed_is_written_or_refused(layout: Any):
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": chain(MAX_DEPTH // 2 - 2)},
    }
    with nullcontext() if layout is not BARE else pytest.raises(RequestError, match="nested so deeply") as refused:
        answer_grammar(Demand("tool_choice"), (tool,), AnswerLayout((layout,)), None, pieces)
    assert refused is None or refused.value.param == "tool_choice"


NAMES = ("a", "b", "c")
SCHEMAS = st.recursive(
    st.sampled_from([NULL, *(ref(f"/$defs/{name}") for name in NAMES)]),
    lambda below: st.one_of(
        st.builds(listed, below, minItems=st.integers(0, 1)),
        st.lists(below, min_size=1, max_size=2).map(lambda parts: either(*parts)),
        st.builds(lambda needed, a, b: record(needed, a=a, b=b), st.sampled_from(["", "a", "a b"]), below, below),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({name: SCHEMAS for name in NAMES}), st.randoms(use_true_random=False))
def test_whatever_is_begun_can_be_ended(parts: dict[str, Any], choose: Any):
    """Of any schema that is left, an answer can be written that makes for its end wherever it can."""
    schema = record("x", x=ref("/$defs/a")) | {"$defs": parts}
    try:
        kept = ending(schema)
    except Endless:
        return
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(kept), log_level=0)
    said = b""
    while not (matcher.is_accepting() and said.endswith(b"}")):
        bias = matcher.compute_logit_bias()
        assert not matcher.is_error(), said
        allowed = [byte for byte in range(33, 127) if bias[byte]]
        assert allowed, said
        # Now and then something is begun; else whatever closes.
        begun = len(said) < 80 and choose.random() < 0.5
        byte = choose.choice(allowed) if begun else next((b for b in b"n}]ul" if b in allowed), allowed[0])
        assert matcher.consume_token(byte)
        said += bytes([byte])
        if len(said) > 2000:  # it is in a circle that only luck leaves: then nothing was wrong with what it began
            return
    json.loads(said)


KEYWORDS = (
    *(
        "type",
        "properties",
        "required",
        "items",
        "prefixItems",
        "minItems",
        "anyOf",
        "allOf",
        "enum",
        "const",
        "$ref",
    ),
    *("$defs", "additionalProperties", "patternProperties", "minProperties", "minLength", "pattern", "nullable"),
)
ANYTHING = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 2.5, 10**30, "", "a", "(", "#", "#/$defs/a", "object", "array", "string"]
    ),
    lambda below: (
        st.lists(below, max_size=2) | st.dictionaries(st.sampled_from([*KEYWORDS, *NAMES]), below, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=4), st.sampled_from([JSON, BARE, TAGS]))
def test_whatever_a_schema_is_made_of_it_is_followed_or_refused(schema: dict[str, Any], layout: Any):
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"properties": {"a": schema}}},
    }
    for strict in (frozenset[str](), frozenset({"f"})):
        try:
            text = answer_grammar(
                Demand("tool_choice", strict=strict), (tool,), AnswerLayout((layout,)), None, pieces
            )
        except RequestError:
            continue
        assert not LLMatcher.validate_grammar(text)


def test_a_type_that_is_no_text_is_refused():
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": record(a={"type": {"b": 1}})},
    }
    with pytest.raises(RequestError, match="is no type") as refused:
        answer_grammar(Demand("tool_choice"), (tool,), AnswerLayout((BARE,)), None, pieces)
    assert refused.value.param == "tool_choice"
