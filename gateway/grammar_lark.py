"""Rules of a grammar as they are collected: Lark as llguidance reads it.

Markers that are special tokens are written as token ids, all other text as bytes, in whatever tokens the model likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from gateway.call_layout import CALL_ID, COUNT
from gateway.schema_parts import target
from gateway.schema_values import Endless, ending

# Blanks are free within bounds: a model that has nothing to say could go on with them for ever.
_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,40}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
_ANY_TEXT = "/(.|\\n)*/"
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_MAX_REASON = 300  # characters
DEFINITIONS = ("$defs", "definitions")
_MAX_REFERENCES = 16
_PATTERNS = {CALL_ID: "/[0-9A-Za-z_-]{1,40}/", COUNT: "/[0-9]{1,9}/"}
_BYTES = LLTokenizer("byte")
_META = r"\.+*?()|[]{}^$#&-~/"
_PLACES = re.compile(f"([{CALL_ID}{COUNT}])")

Split = Callable[[str], Iterable[int | str]]


class NotFollowed(Exception):
    """A schema that answers cannot be held to; the message says which, and why."""


def ended(schema: dict[str, Any], what: str) -> dict[str, Any]:
    """A whole schema without the parts of it that have no end. Raises `NotFollowed`."""
    try:
        return ending(schema)
    except Endless as why:
        raise NotFollowed(f"{what} cannot be followed: {why}") from why


def checked(schema: dict[str, Any], what: str, *, strict: bool) -> dict[str, Any]:
    """A schema with our options. Raises `NotFollowed`."""
    schema = {**schema, "x-guidance": _OPTIONS | ({} if strict else _LENIENT)}
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        problem = LLMatcher.validate_grammar(grammar) or _begun(grammar)
    except ValueError as error:  # as for numbers of more than 64 bits
        problem = str(error)
    if problem:
        raise NotFollowed(f"{what} cannot be followed: {reason(problem)}")
    return schema


def _begun(grammar: str) -> str:
    """Why nothing can begin what is well-formed: a schema that only refers to itself has no value."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    matcher.compute_logit_bias()
    return "it has no value" if matcher.is_error() else ""


def reason(problem: str) -> str:
    """What the library says, without the place in a text that nobody has seen."""
    return _PLACE.sub("", problem.split("\n", 1)[0]).removeprefix("failed to compile JSON schema: ")[:_MAX_REASON]


def definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a schema that its parts may refer to."""
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """What a schema that only refers to a definition beside it stands for."""
    for _ in range(_MAX_REFERENCES):
        meant = target(schema, schema.get("$ref"))
        if not isinstance(meant, dict) or meant is schema:
            break
        schema = {**definitions(schema), **meant}
    return schema


class Lark:
    """Collects rules."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._rules: dict[str, str] = {}

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = self.reserved()
        self.define(name, body, options)
        return name

    def reserved(self) -> str:
        """The name of a rule that is still to be defined: it may refer to itself."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str, options: str = "") -> None:
        self._rules[name] = f"{name}{options}: {body}"

    def terminal(self, pattern: str, without: Iterable[str] = ()) -> str:
        """The name of a new terminal: all text of a pattern but what is that of another one."""
        name = f"T{len(self._rules)}"
        self._rules[name] = f"{name}: /{pattern}/{''.join(f' & ~/{each}/' for each in without)}"
        return name

    def text(self, text: str) -> str:
        """Exactly this text, with anything that fits where it has a place for ids or numbers."""
        pieces = [
            _PATTERNS.get(part) or " ".join(map(_literal, self._split(part)))
            for part in _PLACES.split(text)
            if part
        ]
        return " ".join(pieces) or '""'

    def pieces(self, text: str) -> list[int | str]:
        """The special tokens in a text by their ids, and the texts between them."""
        return list(self._split(text))

    def special(self, texts: Iterable[str]) -> list[int]:
        """The special tokens in some texts."""
        return sorted({piece for text in texts for piece in self._split(text) if isinstance(piece, int)})

    def is_special(self, text: str) -> bool:
        """Whether a text begins with a special token, which no other text can run into."""
        return isinstance(next(iter(self._split(text)), None), int)

    def until(self, end: str) -> str:
        """Any text up to and with an end."""
        if self.is_special(end):
            return f"{self.rule(_ANY_TEXT)} {self.text(end)}"
        first, *others = self._split(end)
        return " ".join([self.rule(_ANY_TEXT, f"[suffix={json.dumps(first)}]"), *map(_literal, others)])

    def json(self, schema: dict[str, Any]) -> str:
        """JSON of a schema that has been `checked`."""
        return self.rule(f"%json {json.dumps(schema)}")

    def written(self, start: str) -> str:
        """The whole grammar."""
        # Without forcing, text that can only go on in one way may still be in any tokens that spell it.
        return "\n".join(['%llguidance {"no_forcing": true}', f"start: {start}", *self._rules.values()])


def pattern(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join("\\n" if c == "\n" else f"\\{c}" if c in _META else c for c in text)


def any_of(alternatives: Iterable[str]) -> str:
    """One of several expressions."""
    return f"({' | '.join(alternatives)})"


def _literal(piece: int | str) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)
