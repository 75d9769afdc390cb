"""The grammar of arguments that have tags of their own."""

from __future__ import annotations

from typing import Any

from gateway.call_layout import Tags
from gateway.grammar_lark import Lark, NotFollowed, any_of, checked, definitions, resolved
from gateway.reply_calls import types_of

_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")


def tagged(lark: Lark, schema: dict[str, Any], tags: Tags, what: str, *, strict: bool) -> str:
    """Arguments in the schema's order, those that are not required in an optional group each.

    Raises `NotFollowed`.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    wanted = set(required) if isinstance(required, list) else set()
    shared = definitions(schema)
    parts: list[str] = []
    for key, value in properties.items() if isinstance(properties, dict) else ():
        given = {**shared, **value} if isinstance(value, dict) else {}
        content = _value(lark, given, tags.close, f"{what} ({key})", strict)
        part = f"{lark.text(tags.open + key + tags.middle)} {content}"
        parts.append(part if key in wanted else f"({part})?")
    return lark.rule(" ".join(parts) or '""')


def _value(lark: Lark, schema: dict[str, Any], close: str, what: str, strict: bool) -> str:
    """A value and what closes it. Strings have no quotes there, so any text will do where one may stand."""
    meant = resolved(schema)
    choices = meant.get("enum", [meant["const"]] if "const" in meant else None)
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return any_of(lark.text(choice + close) for choice in choices)
    kinds = types_of(meant)
    if kinds and "string" not in kinds:
        return f"{lark.json(checked(schema, what, strict=strict))} {lark.text(close)}"
    if strict and (kinds != {"string"} or any(key in meant for key in _OF_STRINGS)):
        raise NotFollowed(f"{what} cannot be followed: in this model's calls, strings can only be free or an enum")
    return lark.until(close)
