"""Grammars of forced answers: calls in the spelling of each template, and what their texts must be."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_reply_templates import FORMATS, NAMES, OURS, WRITTEN_BY_US, needs_templates, renderer

from gateway.call_layout import Again, AnswerLayout, Bare, CallLayout, Tags
from gateway.grammar import Demand, Reasoning, answer_grammar
from gateway.layout_probe import find_layout
from gateway.reply import Reply
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_parser import StreamParser
from protocol.errors import RequestError

END, MARK = 256, 257
FORCED = "tool_choice"
JSON = CallLayout(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    again=Again('}\n{"name": "', '", "arguments": '),
)
TAGS = CallLayout("<call=", ">\n", "</call>", Tags("<arg=", ">\n", "\n</arg>\n"))
BARE = CallLayout("<call>", "", "</call>", Bare('<|"|>', ordered=False))
# Templates that write one call and no second, or not a third as the second.
SINGLE = {
    "GigaChat3-10B-A1.8B",
    "deepseek-ai-DeepSeek-V3",
    "meta-llama-Llama-3.1-8B-Instruct",
    "openai-gpt-oss-120b",
}
CALLING = [name for name in [*NAMES, *OURS] if name in OURS or FORMATS.get(name, WRITTEN_BY_US)[0] != "none"]


class Bytes:
    """A vocabulary of single bytes, an end, and a special token."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END, MARK)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", b"<mark>")

    def __call__(self, text: object) -> list[int]:
        raise TypeError("no text is forced")


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def pieces(text: str) -> list[int | str]:
    before, found, after = text.partition("<mark>")
    return [piece for piece in (before, MARK if found else "", after) if piece != ""]


def no_special(text: str) -> list[int | str]:
    return [text] if text else []


def accepts(grammar: str, text: str) -> bool:
    """Whether a text can be an answer, and the answer ends there."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    ids = [token for piece in pieces(text) for token in (piece.encode() if isinstance(piece, str) else [piece])]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


def tool(name: str = "lookup", required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


LOOKUP = tool(required=("q",), q={"type": "string"}, n={"type": "integer"}, on={"type": "boolean"})


def forced(layout: CallLayout, *tools: dict[str, Any], reasoning: Reasoning | None = None, **demand: Any) -> str:
    return answer_grammar(Demand(FORCED, **demand), tools, AnswerLayout((layout,)), reasoning, pieces)


@needs_templates
@pytest.mark.parametrize("name", CALLING)
def test_forced_calls_are_spelled_as_the_template_spells_them_and_read_as_calls(name: str):
    calls, reasoning = OURS[name][1] if name in OURS else FORMATS.get(name, WRITTEN_BY_US)
    notation, thinking = NOTATIONS[calls], THINKINGS.get(reasoning)
    layouts = find_layout(renderer(name), notation, thinking)
    assert layouts.calls
    assert (layouts.calls[0].again is None) == (name in SINGLE)
    grammar = answer_grammar(Demand(FORCED), [LOOKUP], layouts, None, no_special, many=True)
    single = answer_grammar(Demand(FORCED), [LOOKUP], layouts, None, no_special)
    for layout in layouts.calls:
        for count in (1, 3) if layout.again else (1,):
            arguments = [{"q": "größe\n", "n": 3}, {"q": ""}, {"q": "x", "on": True}][:count]
            text = layout.written(*(("lookup", each) for each in arguments))
            matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
            assert matcher.consume_tokens(list(text.encode()))
            assert matcher.is_accepting()
            assert accepts(single, text) == (count == 1)
            end = renderer(name).habits.end_before_calls
            parser = StreamParser(thinking, notation, Calls((LOOKUP,)), inside=False, one_call=False, end=end)
            reply = Reply.of([*parser.feed(text), *parser.finish()])
            assert [(call.name, call.value()) for call in reply.calls] == [("lookup", each) for each in arguments]
            assert (reply.text, reply.reasoning) == ("", "")


def test_json_arguments_follow_the_schema():
    grammar = forced(JSON, LOOKUP)
    for arguments, fits in (
        ({"q": "x"}, True),
        ({"q": "x", "n": 3, "on": True}, True),
        ({"n": 3}, False),
        ({"q": 3}, False),
        ({"q": "x", "other": 1}, False),
    ):
        assert accepts(grammar, JSON.written(("lookup", arguments))) == fits, arguments
    assert not accepts(grammar, "I cannot.")
    assert not accepts(grammar, JSON.written(("other", {"q": "x"})))
    assert not accepts(grammar, JSON.written(("lookup", {"q": "x"})) * 2)


def test_several_calls_may_come_where_they_are_allowed():
    several = JSON.written(("lookup", {"q": "x"}), ("stop", {}), ("lookup", {"q": "y"}))
    tools = (LOOKUP, tool("stop"))
    layout = AnswerLayout((JSON,))
    many = answer_grammar(Demand(FORCED), tools, layout, None, pieces, many=True)
    assert accepts(many, several)
    assert accepts(many, JSON.written(("stop", {})))
    assert not accepts(many, JSON.written(*[("stop", {})] * 40))
    assert not accepts(forced(JSON, *tools), several)
    named = answer_grammar(Demand(FORCED, tool="lookup"), (LOOKUP,), layout, None, pieces, many=True)
    assert not accepts(named, JSON.written(*[("lookup", {"q": "x"})] * 2))


def test_any_of_the_tools_may_be_called():
    grammar = forced(JSON, LOOKUP, tool("stop"))
    assert accepts(grammar, JSON.written(("lookup", {"q": "x"})))
    assert accepts(grammar, JSON.written(("stop", {})))


def test_blanks_in_json_have_an_end():
    grammar = forced(JSON, LOOKUP)
    tight = JSON.written(("lookup", {"q": "x"}))
    assert accepts(grammar, tight.replace('"x"', ' \n\t"x"'))
    assert not accepts(grammar, tight.replace('"x"', " " * 100 + '"x"'))


def test_a_name_is_escaped_in_json_and_nowhere_else():
    assert accepts(forced(JSON, tool('a"b')), '<tool_call>\n{"name": "a\\"b", "arguments": {}}\n</tool_call>')
    assert accepts(forced(TAGS, tool('a"b')), '<call=a"b>\n</call>')


def test_tagged_arguments_follow_the_schema():
    named = tool(
        required=("q", "kind"),
        q={"type": "string"},
        kind={"enum": ["one", "two"]},
        n={"type": ["integer", "null"]},
        where={"$ref": "#/$defs/place"},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    )
    place = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    named["function"]["parameters"]["$defs"] = {"place": place}
    grammar = forced(TAGS, named)
    for arguments, fits in (
        ({"q": "a\nb </arg", "kind": "two"}, True),
        ({"q": "", "kind": "one", "n": 3, "where": {"x": 1.5}, "note": "null"}, True),
        ({"q": "x", "kind": "one", "n": None}, True),
        ({"q": "x", "kind": "three"}, False),
        ({"q": "x"}, False),
        ({"q": "x", "kind": "one", "n": "many"}, False),
        ({"q": "x", "kind": "one", "where": {"y": 1}}, False),
    ):
        assert accepts(grammar, TAGS.written(("lookup", arguments))) == fits, arguments


COLOR = {"enum": ["red", "dark red"]}
TAGGED: list[tuple[Any, dict[Any, bool]]] = [
    (
        {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
        {"red": True, None: True, '"red"': False, "blue": False},
    ),
    ({"enum": ["one", 2, None]}, {"one": True, 2: True, None: True, "two": False, 3: False}),
    ({"allOf": [{"$ref": "#/$defs/color"}]}, {"red": True, "free": True}),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "integer"}]}, {"red": True, 3: True, "3.5": False}),
    ({"type": ["string", "null"]}, {"x": True, None: True}),
    ({"$ref": "#/properties/n"}, {3: True, "x": False}),
    (
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {'{"n": 3, "value": null}': True, '{"n": 3}': False, None: True},
    ),
    ({"anyOf": []}, {"x": True}),
    ({"anyOf": [False, True]}, {"x": True}),
    (True, {"x": True, 3: True}),
    ({"anyOf": [{"$ref": "#/properties/value"}, {"type": "null"}]}, {None: True, "x": False}),
    ({"anyOf": [{"type": "null"}, *({"const": f"c{at}"} for at in range(99))]}, {"c98": True, "other": True}),
]


@pytest.mark.parametrize(("schema", "values"), TAGGED, ids=lambda value: "" if isinstance(value, dict) else None)
def test_a_tagged_value_is_of_any_branch_of_its_schema_and_is_read_as_that(schema: Any, values: dict[Any, bool]):
    named = tool(required=("value",), n={"type": "integer"}, value=schema)
    named["function"]["parameters"]["$defs"] = {"color": COLOR}
    grammar = forced(TAGS, named)
    read = Calls((named,))
    for value, fits in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        assert accepts(grammar, TAGS.written(("lookup", {"value": text}))) == fits, text
        if fits and not text.startswith("{"):
            assert read.typed("lookup", "value", text) == value


@pytest.mark.parametrize(
    ("schema", "followed"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, True),
        ({"anyOf": [COLOR, {"type": "null"}]}, True),
        ({"type": ["string", "integer"]}, False),
        ({"anyOf": [{"type": "string"}, COLOR]}, False),
        ({"type": ["string", "null"], "maxLength": 3}, False),
        ({}, False),
    ],
)
def test_a_strict_tagged_value_is_held_to_its_schema_or_refused(schema: dict[str, Any], followed: bool):
    with nullcontext() if followed else pytest.raises(RequestError, match="strings can only be free"):
        forced(TAGS, tool(q=schema), strict=frozenset({"lookup"}))


def test_reasoning_that_was_opened_must_end_first():
    grammar = forced(JSON, LOOKUP, reasoning=Reasoning("<think>", "</think>", True))
    call = JSON.written(("lookup", {"q": "x"}))
    assert accepts(grammar, f"Hm.\n<tool_call> or </thin?\n</think>\n\n{call}")
    assert accepts(grammar, f"</think>{call}")
    assert not accepts(grammar, call)
    assert not accepts(grammar, f"</think> Well, {call}")


def test_reasoning_that_may_come_can_be_left_out():
    grammar = forced(JSON, LOOKUP, reasoning=Reasoning("<think>", "</think>", False))
    call = JSON.written(("lookup", {"q": "x"}))
    assert accepts(grammar, call)
    assert accepts(grammar, f"<think>Hm.</think>\n{call}")
    assert not accepts(grammar, f"Hm.</think>\n{call}")


def test_special_tokens_are_asked_for_by_their_ids():
    matcher = LLMatcher(TOKENIZER, forced(CallLayout("<mark>", ":", ""), LOOKUP), log_level=0)
    assert [token for token, value in enumerate(matcher.compute_logit_bias()) if value] == [MARK]
    ended = forced(JSON, LOOKUP, reasoning=Reasoning("<think>", "<mark>", True))
    assert accepts(ended, "Hm.<mark>" + JSON.written(("lookup", {"q": "x"})))
    assert not accepts(ended, "Hm." + JSON.written(("lookup", {"q": "x"})))


@pytest.mark.parametrize("opener", ["<tool_call>", "<mark>"])
def test_strict_calls_may_come_behind_any_text_or_not_at_all(opener: str):
    spelling = CallLayout(
        opener + '\n{"name": "', '", "arguments": ', "}", again=Again(', {"name": "', '", "arguments": ')
    )
    odd = tool("odd", q={"type": "integer", "not": {"const": 3}})
    demand = Demand("tools", strict=frozenset({"lookup", "odd"}), free=True)
    layout = AnswerLayout((spelling,), openers=(opener,))
    grammar = answer_grammar(demand, (LOOKUP, odd), layout, None, pieces)
    call = spelling.written(("lookup", {"q": "x"}))
    for text, fits in (
        ("", True),
        ("I cannot. <tool, {} </tool_call>\n", True),
        (call, True),
        (f"I look.\n\n{call}", True),
        (spelling.written(("lookup", {"q": "x"}), ("odd", {"q": 3})), True),
        (spelling.written(("lookup", {"q": 3})), False),
        (f"I look. {spelling.written(('other', {}))}", False),
        (f"{call} Done.", False),
        (f"{opener} is a tag", False),
    ):
        assert accepts(grammar, text) == fits, text


def test_json_may_be_answered_or_a_tool_called():
    grammar = answer_grammar(Demand("f", {"type": "array"}), [LOOKUP], AnswerLayout((JSON,)), None, pieces)
    assert accepts(grammar, "[1, 2]")
    assert accepts(grammar, JSON.written(("lookup", {"q": "x"})))
    assert not accepts(
        answer_grammar(Demand("f", {"type": "array"}), (), AnswerLayout((JSON,)), None, pieces), "{}"
    )


@pytest.mark.parametrize("layout", [JSON, TAGS])
def test_a_strict_tool_is_followed_or_refused(layout: CallLayout):
    odd = tool(required=("q",), q={"type": "integer", "not": {"const": 3}})
    assert accepts(forced(layout, odd), layout.written(("lookup", {"q": 4})))
    with pytest.raises(RequestError, match=r"tool_choice: the parameters of 'lookup'.*not") as refused:
        forced(layout, odd, strict=frozenset({"lookup"}))
    assert refused.value.param == FORCED


def test_strings_without_quotes_can_have_no_rules_of_their_own():
    with pytest.raises(RequestError, match="strings can only be free or an enum"):
        forced(TAGS, tool(q={"type": "string", "maxLength": 3}), strict=frozenset({"lookup"}))
    assert accepts(
        forced(JSON, tool(q={"type": "string", "maxLength": 3}), strict=frozenset({"lookup"})),
        JSON.written(("lookup", {"q": "abc"})),
    )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "strin"),
        ({"not": {}}, "not"),
        ({"$ref": "http://x/y"}, "http://x/y"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
        ({"enum": ["x" * (1 << 20)]}, "characters"),
    ],
)
def test_a_schema_that_cannot_be_followed_says_why(schema: dict[str, Any], reason: str):
    with pytest.raises(RequestError, match=reason) as refused:
        answer_grammar(Demand("response_format", schema), (), AnswerLayout(), None, pieces)
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 500
