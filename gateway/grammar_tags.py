"""The grammar of arguments that have tags of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from gateway.call_layout import Tags
from gateway.grammar_lark import DEFINITIONS, Lark, NotFollowed, any_of, checked, definitions, resolved
from gateway.reply_calls import types_of
from gateway.schema_parts import inside

_OF_STRINGS = ("pattern", "format", "minLength", "maxLength", "enum", "const")
_BESIDE_STRINGS = {"string", "null", "boolean"}  # any text is one of these
_MAX_BRANCHES = 64
_WHOLE = "whole"  # under which all parameters are a definition of one


def tagged(lark: Lark, schema: dict[str, Any], tags: Tags, what: str, *, strict: bool) -> str:
    """Arguments in the schema's order, those that are not required in an optional group each.

    Raises `NotFollowed`.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    wanted = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    shared = _Shared.of(schema)
    parts: list[str] = []
    for key, value in properties.items() if isinstance(properties, dict) else ():
        if value is False and key not in wanted:
            continue
        given = shared.alone(value) if isinstance(value, dict) else {}
        content = _value(lark, given, tags.close, f"{what} ({key})", strict)
        part = f"{lark.text(tags.open + key + tags.middle)} {content}"
        parts.append(part if key in wanted else f"({part})?")
    return lark.rule(" ".join(parts) or '""')


def _value(lark: Lark, schema: dict[str, Any], close: str, what: str, strict: bool) -> str:
    """A value and what closes it. Strings have no quotes there, so any text will do where one may stand."""
    kinds = types_of(schema)
    if kinds and "string" not in kinds:
        return f"{lark.json(checked(schema, what, strict=strict))} {lark.text(close)}"
    branches = list(_branches(schema))
    written = [_written(lark, branch, what, strict) for branch in branches]
    if written and all(written):
        return f"{any_of(chain.from_iterable(written))} {lark.text(close)}"
    limited = any(key in branch for branch in branches for key in _OF_STRINGS)
    if strict and (limited or not kinds or not kinds <= _BESIDE_STRINGS):
        raise NotFollowed(f"{what} cannot be followed: in this model's calls, strings can only be free or an enum")
    return lark.until(close)


def _written(lark: Lark, schema: dict[str, Any], what: str, strict: bool) -> list[str]:
    """All ways to write a value, or none where any text is one."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        return [lark.text(choice if isinstance(choice, str) else json.dumps(choice)) for choice in choices]
    kinds = types_of(schema)
    return [lark.json(checked(schema, what, strict=strict))] if kinds and "string" not in kinds else []


def _branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas one of which a value must fit, in their order; `{}` stands for those that are too many."""
    left = [schema]
    for _ in range(_MAX_BRANCHES):
        if not left:
            return
        meant = resolved(left.pop())
        branches = next((meant[name] for name in ("anyOf", "oneOf") if isinstance(meant.get(name), list)), None)
        if branches is None or "type" in meant:
            yield meant
        else:
            shared = definitions(meant)
            left += [
                shared | each if isinstance(each, dict) else {} for each in reversed(branches) if each is not False
            ]
    if left:
        yield {}


class _Shared(NamedTuple):
    """The definitions that parameters may refer to. `moved`: all of the parameters are one, and so referred to."""

    definitions: dict[str, Any]
    moved: bool

    @staticmethod
    def of(whole: dict[str, Any]) -> _Shared:
        beside = tuple(f"#/{name}/" for name in DEFINITIONS)
        references = [r for each in inside(whole) if isinstance(r := each.get("$ref"), str) and r.startswith("#")]
        if all(reference.startswith(beside) for reference in references):
            return _Shared(definitions(whole), moved=False)
        return _Shared({DEFINITIONS[0]: {_WHOLE: _moved(whole)}}, moved=True)

    def alone(self, part: dict[str, Any]) -> dict[str, Any]:
        """One of the parameters as a schema of its own, with all that it may refer to."""
        if not any("$ref" in each for each in inside(part)):
            return part
        return (_moved(part) if self.moved else part) | self.definitions


def _moved(value: Any) -> Any:
    """A schema whose references are into `_WHOLE`."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        moved = {key: _moved(below) for key, below in value.items()}
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = f"#/{DEFINITIONS[0]}/{_WHOLE}{reference[1:]}"
        return moved
    return [_moved(below) for below in value] if isinstance(value, list) else value
