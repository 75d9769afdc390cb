"""Grammars for answers that must be JSON of a schema, or a call of a tool: Lark as llguidance reads it.

Markers that are special tokens are written as token ids, all other text as bytes, in whatever tokens the model likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from gateway.call_layout import CallLayout, Tags
from gateway.reply_calls import types_of
from protocol.errors import RequestError
from protocol.limits import MAX_GRAMMAR_CHARACTERS

# Blanks are free within bounds: a model that has nothing to say could go on with them for ever.
_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,40}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
_GAP = "/[ \\n]{0,4}/"  # between reasoning and what follows it
_ANY_TEXT = "/(.|\\n)*/"
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_MAX_REASON = 300  # characters
_DEFINITIONS = ("$defs", "definitions")
_MAX_REFERENCES = 16
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")

Split = Callable[[str], Iterable[int | str]]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants an answer to be. `field` is what the client calls it.

    With a `schema`, JSON of it; otherwise a call of one tool: `tool`, or any. Tools in `strict` must be called
    exactly as their schemas say, others as far as these can be followed.
    """

    field: str
    schema: Mapping[str, Any] | None = None
    tool: str | None = None
    strict: frozenset[str] = frozenset()

    def refused(self, problem: str) -> RequestError:
        return RequestError(f"{self.field}: {problem}", param=self.field)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers of what may be thought before. `opened`: it has begun already, so it must end."""

    open: str
    close: str
    opened: bool


def answer_grammar(
    demand: Demand,
    tools: Iterable[dict[str, Any]],
    layout: CallLayout | None,
    reasoning: Reasoning | None,
    split: Split,
) -> str:
    """The grammar of an answer to `demand`. `tools` are those that may be called, `split` finds special tokens.

    Raises `RequestError` naming the field, for what cannot be held to.
    """
    lark = _Lark(split)
    answers = [] if demand.schema is None else [lark.json(_checked(dict(demand.schema), demand, "the schema"))]
    if layout is not None:
        answers += [_call(lark, tool["function"], layout, demand) for tool in tools]
    text = lark.written(answers, reasoning)
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise demand.refused(f"schemas of more than {MAX_GRAMMAR_CHARACTERS} characters are not supported")
    if problem := LLMatcher.validate_grammar(text):
        raise demand.refused(_reason(problem))
    return text


def _call(lark: _Lark, function: dict[str, Any], layout: CallLayout, demand: Demand) -> str:
    name = function["name"]
    what = f"the parameters of {name!r}"
    strict = name in demand.strict
    schema = {**function["parameters"], "type": "object"}
    spelled = json.dumps(name, ensure_ascii=False)[1:-1] if layout.before.endswith('"') else name
    before, after = layout.before + spelled + layout.between, layout.after
    if layout.tags is None:
        arguments = lark.json(_checked(schema, demand, what, strict=strict))
    else:
        arguments = _tagged(lark, schema, layout.tags, demand, what, strict)
    return lark.rule(f"{lark.text(before)} {arguments} {lark.text(after)}")


def _tagged(lark: _Lark, schema: dict[str, Any], tags: Tags, demand: Demand, what: str, strict: bool) -> str:
    """Arguments in the schema's order, those that are not required in an optional group each."""
    properties = schema.get("properties")
    required = schema.get("required")
    wanted = set(required) if isinstance(required, list) else set()
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    parts: list[str] = []
    for key, value in properties.items() if isinstance(properties, dict) else ():
        given = {**shared, **value} if isinstance(value, dict) else {}
        content = _tag_value(lark, given, tags.close, demand, f"{what} ({key})", strict)
        part = f"{lark.text(tags.open + key + tags.middle)} {content}"
        parts.append(part if key in wanted else f"({part})?")
    return lark.rule(" ".join(parts) or '""')


def _tag_value(lark: _Lark, schema: dict[str, Any], close: str, demand: Demand, what: str, strict: bool) -> str:
    """A value and what closes it. Strings have no quotes there, so any text will do where one may stand."""
    meant = _resolved(schema)
    choices = meant.get("enum", [meant["const"]] if "const" in meant else None)
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(lark.text(choice + close) for choice in choices)})"
    kinds = types_of(meant)
    if kinds and "string" not in kinds:
        return f"{lark.json(_checked(schema, demand, what, strict=strict))} {lark.text(close)}"
    if strict and (kinds != {"string"} or any(key in meant for key in _OF_STRINGS)):
        raise demand.refused(
            f"{what} cannot be followed: in this model's calls, strings can only be free or an enum"
        )
    return lark.until(close)


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """What a schema that only refers to a definition beside it stands for."""
    for _ in range(_MAX_REFERENCES):
        target: Any = schema
        path = schema.get("$ref")
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        for step in path[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = {**{key: schema[key] for key in _DEFINITIONS if key in schema}, **target}
    return schema


def _checked(schema: dict[str, Any], demand: Demand, what: str, *, strict: bool = True) -> dict[str, Any]:
    """The schema with our options. Raises `RequestError` where it cannot be followed."""
    schema = {**schema, "x-guidance": _OPTIONS | ({} if strict else _LENIENT)}
    if problem := LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)):
        raise demand.refused(f"{what} cannot be followed: {_reason(problem)}")
    return schema


def _reason(problem: str) -> str:
    return _PLACE.sub("", problem.split("\n", 1)[0]).removeprefix("failed to compile JSON schema: ")[:_MAX_REASON]


class _Lark:
    """Collects rules."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text."""
        pieces = (f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in self._split(text))
        return " ".join(pieces) or '""'

    def until(self, end: str) -> str:
        """Any text up to and with an end."""
        first, *others = self._split(end)
        if isinstance(first, int):  # text holds no special tokens, so it cannot run over this one
            body = self.rule(_ANY_TEXT)
            return f"{body} {self.text(end)}"
        body = self.rule(_ANY_TEXT, f"[suffix={json.dumps(first)}]")
        return " ".join([body, *(f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in others)])

    def json(self, schema: dict[str, Any]) -> str:
        return self.rule(f"%json {json.dumps(schema)}")

    def written(self, answers: list[str], reasoning: Reasoning | None) -> str:
        """The whole grammar of one of some answers, behind reasoning if there may be any."""
        start = f"({' | '.join(answers)})"
        if reasoning is not None:
            thought = f"{self.until(reasoning.close)} {self.rule(_GAP)}"
            thought = thought if reasoning.opened else f"({self.text(reasoning.open)} {thought})?"
            start = f"{thought} {start}"
        # Without forcing, text that can only go on in one way may still be in any tokens that spell it.
        return "\n".join(['%llguidance {"no_forcing": true}', f"start: {start}", *self._rules])
