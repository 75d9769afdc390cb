"""Schemas that take too long to compile are refused by their field, and those that real tools have are not."""

from __future__ import annotations

from typing import Any

import pytest
from test_answer_grammar import JSON, pieces

from gateway.call_layout import AnswerLayout
from gateway.grammar import Demand, answer_grammar
from gateway.schema_cost import MAX_PROPERTIES, too_costly
from protocol.errors import RequestError


def objects(count: int, properties: int) -> dict[str, Any]:
    part = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(properties)}}
    return {"type": "object", "properties": {f"o{at}": part for at in range(count)}}


def patterned(count: int, key: str = "patternProperties") -> dict[str, Any]:
    return {"type": "object", key: {f"^x{at}$": {"type": "integer"} for at in range(count)}}


def joint(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"allOf": list(parts), **more}


def pattern(at: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"a{{{at}}}"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (objects(1, MAX_PROPERTIES + 1), "properties in one object"),
    (objects(11, MAX_PROPERTIES), "in all"),
    (patterned(65), "patternProperties"),
    ({"type": "object", "properties": {f"o{at}": patterned(20) for at in range(4)}}, "patternProperties"),
    ({"type": "integer", "multipleOf": 999983}, "multipleOf"),
    ({"type": "number", "multipleOf": 0.0000999983}, "multipleOf"),
    ({"anyOf": [{"type": "integer", "multipleOf": 9000 + at} for at in range(5)]}, "multipleOf"),
    (joint(*({"type": "integer", "multipleOf": n} for n in (97, 89, 83))), "multipleOf"),
    (joint(*map(pattern, range(13))), "allOf"),
    (joint(joint(*map(pattern, range(7))), joint(*map(pattern, range(7)))), "allOf"),
    (
        joint(
            {"$ref": "#/$defs/a"},
            {"$ref": "#/$defs/b"},
            **{"$defs": {"a": joint(*map(pattern, range(7))), "b": joint(*map(pattern, range(7)))}},
        ),
        "allOf",
    ),
    ({"type": "integer", "minimum": -(10**30)}, "cannot be followed"),
    ({"type": "integer", "multipleOf": 10**30 + 1}, "cannot be followed"),
    ({"$ref": "#"}, "has no value|circular"),
    (joint({"$ref": "#"}), "has no value|circular"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_takes_too_long_is_refused_by_its_field(schema: dict[str, Any], reason: str):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    for demand, tools in ((Demand("response_format", schema), ()), (Demand("tool_choice"), (tool,))):
        with pytest.raises(RequestError, match=reason) as refused:
            answer_grammar(demand, tools, AnswerLayout((JSON,)), None, pieces)
        assert refused.value.param == demand.field


@pytest.mark.parametrize(
    "schema",
    [
        objects(9, 400),
        patterned(30),
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 5000},
        joint(pattern(1), {"type": "string", "maxLength": 9}),
        joint({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": 3}),
        {"allOf": 3, "properties": [], "patternProperties": None, "multipleOf": True, "$ref": {}},
        {"enum": [{"properties": {}}, [1]]},
    ],
)
def test_others_are_not(schema: dict[str, Any]):
    assert too_costly([schema]) is None


def test_a_reference_to_itself_has_an_end():
    schema: dict[str, Any] = {"$defs": {"a": joint({"$ref": "#/$defs/b"}), "b": joint({"$ref": "#/$defs/a"})}}
    assert too_costly([joint({"$ref": "#/$defs/a"}, **schema)]) is None


def test_the_tools_of_a_request_count_together():
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": patterned(40)}}
    with pytest.raises(RequestError, match="patternProperties"):
        answer_grammar(Demand("tool_choice"), (tool, tool), AnswerLayout((JSON,)), None, pieces)
