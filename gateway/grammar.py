"""Grammars for answers that must be JSON of a schema, or a call of a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from gateway.call_layout import NAMED, AnswerLayout, Bare, CallLayout, Tags
from gateway.grammar_bare import BareValues
from gateway.grammar_beside import Callee, beside_text
from gateway.grammar_lark import Lark, NotFollowed, Split, any_of, checked, ended, reason
from gateway.grammar_tags import tagged
from gateway.reply_json import quoted
from gateway.schema_cost import too_costly
from protocol.errors import RequestError
from protocol.limits import MAX_GRAMMAR_CHARACTERS

_MAX_FURTHER = 15  # calls behind the first: a model that has nothing else to do could go on for ever
_GAP = "/[ \\n]{0,4}/"  # between reasoning and what follows it


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants an answer to be. `field` is what the client calls it.

    With a `schema`, JSON of it; otherwise a call of one tool: `tool`, or any. Tools in `strict` must be called
    exactly as their schemas say, others as far as these can be followed. If it is `free`, any text will do, and calls
    behind it; then all tools are followed as far as can be, and `only` says that no others may be called.
    """

    field: str
    schema: Mapping[str, Any] | None = None
    tool: str | None = None
    strict: frozenset[str] = frozenset()
    free: bool = False
    only: bool = False

    @property
    def made_of(self) -> tuple[object, ...]:
        """What a grammar depends on: not how the client calls it."""
        return self.schema, self.tool, sorted(self.strict), self.free

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
    tools: Sequence[dict[str, Any]],
    layout: AnswerLayout,
    reasoning: Reasoning | None,
    split: Split,
    *,
    many: bool = False,
) -> str:
    """The grammar of an answer to `demand`. `tools` are those that may be called, `split` finds special tokens.

    Further calls may follow the first if `many` are wanted, and not those of one certain tool.
    Raises `RequestError` naming the field, for what cannot be held to.
    """
    schemas = [] if demand.schema is None else [demand.schema]
    if problem := too_costly([*schemas, *(tool["function"]["parameters"] for tool in tools)]):
        raise demand.refused(f"{problem} are not supported")
    lark = Lark(split)
    answers: list[str] = []
    try:
        if demand.schema is not None:
            schema = checked(ended(dict(demand.schema), "the schema"), "the schema", strict=True)
            answers.append(f"{lark.text(layout.said or '')} {lark.json(schema)}")
        if tools and layout.calls:
            functions = (tool["function"] for tool in tools)
            callees = [Callee(f["name"], _arguments(lark, f, layout.calls[0], demand)) for f in functions]
            many = many and demand.tool is None
            if demand.free:
                answers.append(
                    beside_text(lark, layout, callees, lambda each: _calls(lark, callees, each, many=True))
                )
            else:
                answers += [_calls(lark, callees, spelling, many=many) for spelling in layout.calls]
    except NotFollowed as why:
        raise demand.refused(str(why)) from why
    except RecursionError as error:  # some rules are written by calls that nest as the schema does
        raise demand.refused("schemas that are nested so deeply are not supported") from error
    thought = "" if demand.free else _thought(lark, layout, reasoning)
    text = lark.written(f"{thought} {any_of(answers)}")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise demand.refused(f"schemas of more than {MAX_GRAMMAR_CHARACTERS} characters are not supported")
    if problem := LLMatcher.validate_grammar(text):
        raise demand.refused(reason(problem))
    return text


def _thought(lark: Lark, layout: AnswerLayout, reasoning: Reasoning | None) -> str:
    """What stands before the answer."""
    if reasoning is None:
        return ""
    resumed = lark.rule(_GAP) if layout.resumed is None else lark.text(layout.resumed)
    thought = f"{lark.until(reasoning.close)} {resumed}"
    return thought if reasoning.opened else f"({lark.text(reasoning.open)} {thought})?"


def _arguments(lark: Lark, function: dict[str, Any], layout: CallLayout, demand: Demand) -> str:
    """The name of a rule for a tool's arguments. Raises `NotFollowed`."""
    what = f"the parameters of {function['name']!r}"
    strict = function["name"] in demand.strict
    if demand.free:
        try:
            return _values(lark, function, layout, what, strict=strict)
        except NotFollowed:
            strict = False
    return _values(lark, function, layout, what, strict=strict)


def _values(lark: Lark, function: dict[str, Any], layout: CallLayout, what: str, *, strict: bool) -> str:
    schema = ended({**function["parameters"], "type": "object"}, what)
    match layout.values:
        case None:
            return lark.json(checked(schema, what, strict=strict))
        case Bare():
            return BareValues(lark, layout.values, schema, what, strict=strict).arguments()
        case Tags():
            return tagged(lark, schema, layout.values, what, strict=strict)


def _calls(lark: Lark, callees: Sequence[Callee], layout: CallLayout, *, many: bool) -> str:
    """A call of any of some tools, and further ones where there may be `many`."""

    def call(before: str, between: str) -> str:
        return any_of(f"{lark.text(_headed(before, name, between))} {rule}" for name, rule in callees)

    again = f"({call(*layout.again)}){{0,{_MAX_FURTHER}}}" if many and layout.again is not None else ""
    return lark.rule(f"{call(layout.before, layout.between)} {again} {lark.text(layout.after)}")


def _headed(before: str, name: str, between: str) -> str:
    spelled = quoted(name)[1:-1] if before.endswith('"') else name
    return before.replace(NAMED, name) + spelled + between
