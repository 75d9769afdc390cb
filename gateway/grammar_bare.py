"""The grammar of arguments whose keys have no quotes and whose strings have quotes of their own, from their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gateway.call_layout import Bare
from gateway.grammar_lark import Lark, NotFollowed, any_of, checked, pattern
from gateway.reply_call_gemma import bare_key, bare_text
from gateway.schema_parts import target

_KEY = r'[^\s,:{}\[\]"<]{1,64}'
_MAX_LENGTH = 2000  # characters of a string that are counted
_MAX_ITEMS = 1000  # of an array that are counted
_SAID = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"}
_SAID |= {"$schema", "$id", "$comment", "$defs", "definitions", "type", "x-guidance", "strict"}
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_FOLLOWED = {
    "string": {"minLength", "maxLength"},
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


class BareValues:
    """Writes the rules of one tool's arguments. `what` they are called in a refusal."""

    def __init__(self, lark: Lark, layout: Bare, schema: dict[str, Any], what: str, *, strict: bool) -> None:
        self._lark, self._layout, self._root = lark, layout, schema
        self._what, self._strict = what, strict
        self._references: dict[str, str] = {}
        self._anything = ""

    def arguments(self) -> str:
        """The object of all arguments. Raises `NotFollowed`."""
        return self._value(self._root, "")

    def _value(self, schema: Any, path: str) -> str:
        """The name of a rule for a value; `path` says where it stands."""
        if schema is False:
            raise self._refused(path, "no value fits")
        if not isinstance(schema, dict):
            return self._any()
        reference = schema.get("$ref")
        if reference is None:
            return self._lark.rule(any_of(self._alternatives(schema, path)))
        if not isinstance(reference, str):
            raise self._refused(path, "$ref is no text")
        if reference not in self._references:
            meant = target(self._root, reference)
            if meant is None:
                raise self._refused(path, f"{reference} is not found")
            name = self._references[reference] = self._lark.reserved()
            self._lark.define(name, self._value(meant, path))
        return self._references[reference]

    def _alternatives(self, schema: dict[str, Any], path: str) -> Iterator[str]:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list):
            yield from (self._literal(choice, path) for choice in choices)
            return
        for name in ("anyOf", "oneOf"):
            branches = schema.get(name)
            if isinstance(branches, list) and branches and not (self._strict and name == "oneOf"):
                self._check(schema, {name}, path)
                left = [branch for branch in branches if branch is not False] or branches
                yield from (self._value(branch, path) for branch in left)
                return
        kinds = schema.get("type") or self._implied(schema, path)
        listed = kinds if isinstance(kinds, list) else [kinds]
        for kind in listed:
            if not isinstance(kind, str) or kind not in _FOLLOWED:
                raise self._refused(path, f"{kind!r} is no type")
        self._check(schema, {key for kind in listed for key in _FOLLOWED[kind]}, path)
        if schema.get("nullable") is True and "null" not in listed:
            yield '"null"'
        for kind in listed:
            yield self._of_kind(kind, schema, path)
        if not listed:
            yield self._any()

    def _implied(self, schema: dict[str, Any], path: str) -> str | list[str]:
        for kind, key in (("object", "properties"), ("array", "items")):
            if key in schema:
                return kind
        self._check(schema, set(), path)
        return []

    def _of_kind(self, kind: str, schema: dict[str, Any], path: str) -> str:
        match kind:
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path)
            case "object":
                return self._object(schema, path)
        bounds = {key: schema[key] for key in _FOLLOWED[kind] if key in schema}
        given = checked({**bounds, "type": kind}, self._place(path), strict=self._strict)
        return self._lark.json(given)

    def _literal(self, value: Any, path: str) -> str:
        if self._layout.quote in json.dumps(value, ensure_ascii=False).replace('\\"', '"'):
            raise self._refused(path, f"no value can hold {self._layout.quote}")
        return self._lark.text(bare_text(value))

    def _string(self, schema: dict[str, Any], path: str) -> str:
        quote = self._layout.quote
        least, most = schema.get("minLength"), schema.get("maxLength")
        if least is not None or most is not None:
            bounds = [n for n in (least, most) if n is not None]
            counted = all(isinstance(n, int) and 0 <= n <= _MAX_LENGTH for n in bounds)
            if counted and self._lark.is_special(quote):
                body = self._lark.rule(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
                return f"{self._lark.text(quote)} {body} {self._lark.text(quote)}"
            if self._strict:
                raise self._refused(path, f"a length beyond {_MAX_LENGTH} is not counted")
        return f"{self._lark.text(quote)} {self._lark.until(quote)}"

    def _array(self, schema: dict[str, Any], path: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        for count in (least, most):
            if count is not None and not (isinstance(count, int) and 0 <= count <= _MAX_ITEMS):
                if self._strict:
                    raise self._refused(path, f"items beyond {_MAX_ITEMS} are not counted")
                least, most = 0, None
        items = schema.get("items")
        if most == 0 or (items is False and not least):
            return '"[" "]"'
        item = self._value(items, f"{path}[]")
        further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        some = f"{item} {further}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, schema: dict[str, Any], path: str) -> str:
        """Properties in their order, with a comma before each but the first that is there."""
        properties = schema.get("properties")
        named = dict(properties) if isinstance(properties, dict) else {}
        required = schema.get("required")
        wanted = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
        for key in wanted:
            named.setdefault(key, True)
        keys = sorted(named) if self._layout.ordered else list(named)
        others = self._others(schema.get("additionalProperties", True), keys, path)
        # Behind the first property that is there, and where none has been written yet.
        rest = self._lark.rule(f'("," {others})*' if others else '""')
        first = self._lark.rule(f'({others} ("," {others})*)?' if others else '""')
        for key in reversed(keys):
            if named[key] is False and key not in wanted:
                continue
            inner = self._value(named[key], f"{path}.{key}".lstrip("."))
            pair = self._lark.rule(f"{self._lark.text(bare_key(key) + ':')} {inner}")
            if key in wanted:
                first, rest = self._lark.rule(f"{pair} {rest}"), self._lark.rule(f'"," {pair} {rest}')
            else:
                first = self._lark.rule(f"{pair} {rest} | {first}")
                rest = self._lark.rule(f'("," {pair})? {rest}')
        return f'"{{" {first} "}}"'

    def _others(self, schema: Any, keys: list[str], path: str) -> str:
        """A property that has no schema of its own, or "" where there may be none."""
        if schema is False:
            return ""
        value = self._value(schema, f"{path}.*".lstrip("."))
        taken = "|".join(map(pattern, keys))
        key = self._lark.terminal(_KEY, [f"({taken})"] if taken else [])
        return self._lark.rule(f'{key} ":" {value}')

    def _any(self) -> str:
        """Any value at all."""
        if not self._anything:
            self._anything = self._lark.reserved()
            key = self._lark.terminal(_KEY)
            pair = self._lark.rule(f'{key} ":" {self._anything}')
            scalar = self._lark.json(checked({"type": ["number", "boolean", "null"]}, self._what, strict=False))
            items, pairs = (f'({each} ("," {each})*)?' for each in (self._anything, pair))
            quote = self._layout.quote
            text = f"{self._lark.text(quote)} {self._lark.until(quote)}"
            self._lark.define(self._anything, f'{scalar} | {text} | "[" {items} "]" | "{{" {pairs} "}}"')
        return self._anything

    def _check(self, schema: dict[str, Any], followed: set[str], path: str) -> None:
        for key in schema:
            if self._strict and key not in followed and key not in _SAID:
                raise self._refused(path, f"{key} has no place in this model's calls")

    def _place(self, path: str) -> str:
        return f"{self._what} ({path})" if path else self._what

    def _refused(self, path: str, problem: str) -> NotFollowed:
        return NotFollowed(f"{self._place(path)} cannot be followed: {problem}")
