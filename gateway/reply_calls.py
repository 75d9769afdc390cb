"""What all notations of calls share: numbering, ids, the tools that may be called, and the types of arguments."""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from secrets import token_hex
from typing import Any, Protocol

from gateway.body import mended
from gateway.reply import CallArguments, CallEnd, CallStart, Part
from gateway.reply_json import JsonValue
from gateway.reply_scanner import Scanner, Steps
from gateway.schema_parts import target

MAX_NAME = 256  # characters; longer ones are no names
_MAX_PYTHON = 100_000  # characters


class Calls:
    """The calls of one answer: numbers them, mints their ids and knows the tools' parameters."""

    def __init__(self, tools: Iterable[dict[str, Any]] = ()) -> None:
        functions = [tool["function"] for tool in tools]
        self._parameters = {f["name"]: f.get("parameters") or {} for f in functions}
        self.made = 0

    def known(self, name: str) -> bool:
        return name in self._parameters

    def start(self, name: str) -> Part:
        self.made += 1
        return CallStart(self.made - 1, f"call_{token_hex(12)}", mended(name))

    def arguments(self, fragment: str) -> Part:
        return CallArguments(self.made - 1, mended(fragment))

    def end(self) -> Part:
        return CallEnd(self.made - 1)

    def escaped(self, text: str) -> Iterator[Part]:
        """More of a string in the arguments."""
        if text:
            yield self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def object(self, scanner: Scanner) -> Steps[None]:
        """Pass on the JSON value that comes next as arguments, up to its end or to where it breaks."""
        value = JsonValue()
        while True:
            start = scanner.at
            scanner.at = value.advance(scanner.text, start)
            if scanner.at > start:
                yield self.arguments(scanner.text[start : scanner.at])
                scanner.drop()
            if value.closed or value.broken or scanner.ended:
                return
            yield None

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that a parameter may have, as far as its schema says; empty where it says nothing."""
        parameters = self._parameters.get(name, {})
        properties = parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return types_of(schema, parameters)

    def typed(self, name: str, key: str, text: str) -> Any:
        """The value that a notation without types writes as `text`."""
        types = self.types(name, key)
        if types == {"string"}:
            return text
        value: Any
        try:
            value = json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError):
            value = _python(text.strip())
        if isinstance(value, str):
            return text  # a string is written without quotes: these are its own
        if types and not _is_one_of(value, types):
            return text
        return value


class Notation(Protocol):
    """One way in which models write calls. Immutable."""

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers with which a section of calls begins in the text."""

    @property
    def closers(self) -> tuple[str, ...]:
        """Markers that mean nothing behind a call, should one be left over."""

    @property
    def inner(self) -> tuple[str, ...]:
        """All other markers."""

    def section(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[bool]:
        """Read the section behind an opener; whether there was a call in it.

        Where there was none, the scanner is left anywhere, with nothing dropped. "" opens an answer that has
        no opener (`bare`).
        """

    @property
    def bare(self) -> bool:
        """An answer may also be a call without any opener."""


class OpenedCalls(ABC):
    """A notation in which each call has an opener, if it is not "", and several may stand in a section."""

    __slots__ = ()
    call: str
    end: str
    section_open: str
    section_end: str

    @property
    def openers(self) -> tuple[str, ...]:
        """See `Notation`."""
        return tuple(marker for marker in (self.section_open, self.call) if marker)

    @property
    def closers(self) -> tuple[str, ...]:
        """See `Notation`."""
        return tuple(marker for marker in (self._end, self.section_end) if marker)

    @property
    def _end(self) -> str:
        """What has to be there of `end`."""
        return self.end

    def section(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[bool]:
        """See `Notation`."""
        made, at_call = False, opener == self.call
        while True:
            if not at_call:
                yield from scanner.skip()
                if self.section_end and (yield from scanner.take(self.section_end)):
                    return made
                if not (yield from scanner.take(self.call)):
                    return made
            at_call = not self.call
            start = scanner.at
            if not (yield from self._call(scanner, calls)):
                scanner.at = start if made else scanner.at
                return made
            made = True

    @abstractmethod
    def _call(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        """Read a call behind its opener; whether it was one."""


def no_constant(name: str) -> Any:
    """For `json.loads`: NaN and infinities are no JSON. Raises `ValueError`."""
    raise ValueError(f"{name} is no JSON")


def _python(text: str) -> Any:
    """Lists, objects and constants as Python prints them, as some templates do; else the text itself."""
    if len(text) > _MAX_PYTHON or not text.startswith(("[", "{", "True", "False", "None")):
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


def types_of(schema: Any, root: Any = None) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says; empty where it says nothing.

    What it refers to is in `root`, or in itself.
    """
    root = schema if root is None else root
    found: set[str] = set()
    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if part is False or id(part) in seen:
            continue
        seen.add(id(part))
        own = _own_types(part)
        below = () if own else _stands_for(part, root)
        if not own and not below:
            return frozenset()
        found |= own
        left += below
    return frozenset(found)


def _own_types(schema: Any) -> frozenset[str]:
    """The types that a schema names itself."""
    if not isinstance(schema, dict):
        return frozenset()
    kinds, choices = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kinds is None and isinstance(choices, list):
        return frozenset(map(_type_of, choices))
    listed = kinds if isinstance(kinds, list) else [kinds]
    return frozenset(kind for kind in listed if isinstance(kind, str))


def _stands_for(schema: Any, root: Any) -> Sequence[Any]:
    """The schemas one of which a value must fit that fits a schema without types."""
    if not isinstance(schema, dict):
        return ()
    if "$ref" in schema:
        return (target(root, schema["$ref"]),)
    for name in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(name), list):
            return branches
    every = schema.get("allOf")
    telling = (
        (part for part in every if _own_types(part) or _stands_for(part, root)) if isinstance(every, list) else ()
    )
    return list(islice(telling, 1))


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _is_one_of(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types) or (kind == "number" and "integer" in types)
