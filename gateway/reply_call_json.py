"""Calls as JSON objects that hold name and arguments: Hermes, Qwen, Llama, older Mistral models and many others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gateway.reply import Part
from gateway.reply_calls import MAX_NAME, Calls
from gateway.reply_json import captured, quoted, string
from gateway.reply_scanner import BLANKS, Scanner, Steps

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_EXPECTED = (*_NAMES, *_ARGUMENTS, "id", "type")  # what an object without opener may hold to be taken for a call


@dataclass(frozen=True, slots=True)
class JsonNotation:
    """`{"name": ..., "arguments": {...}}`, one or a list of them, behind an opener.

    `keyed`: the objects are `{name: arguments}` instead. `bare`: an answer that begins with such an object is a call
    too, if it names a tool there is; with `name_first`, only if it does so before anything else.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    keyed: bool = False
    bare: bool = False
    inner: tuple[str, ...] = ()
    name_first: bool = False

    def held(self) -> JsonNotation:
        """For answers whose grammar holds calls to their form: what only resembles one without an opener is text."""
        return replace(self, name_first=True)

    def section(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[bool]:
        """See `Notation`."""
        made = False
        if not opener and self.name_first and not (yield from _is_named_first(scanner)):
            return False
        while True:
            following = yield from scanner.skip(BLANKS + "[],;" + ("}" if made else ""))
            if following != "{":
                yield from scanner.take(*self.closers)
                return made
            start = scanner.at
            if not (yield from self._call(scanner, calls, only_known=not opener)):
                scanner.at = start if made else scanner.at
                return made
            made = True

    def _call(self, scanner: Scanner, calls: Calls, *, only_known: bool) -> Steps[bool]:
        """One object. Its call starts as soon as its arguments do, if its name came before them."""
        scanner.at += 1
        name: str | None = None
        arguments: str | None = None
        depth = 1
        while depth:
            following = yield from scanner.skip(BLANKS + ",")
            if following == "}":
                scanner.at += 1
                depth -= 1
                continue
            key = (yield from string(scanner)) if following == '"' else None
            if key is None or (yield from scanner.skip()) != ":" or (only_known and key not in _EXPECTED):
                return False
            scanner.at += 1
            following = yield from scanner.skip()
            if key == "function" and following == "{":
                scanner.at += 1
                depth += 1
            elif key in _NAMES and following == '"' and not self.keyed:
                name = yield from string(scanner)
                if only_known and not calls.known(name or ""):
                    return False
            elif key in _ARGUMENTS or (self.keyed and following == "{"):
                name = key if self.keyed else name
                if following == "{" and _is_name(name):
                    yield from self._streamed(scanner, calls, name or "", depth)
                    return True
                arguments = yield from captured(scanner)
                if arguments is None:
                    return False
            elif (yield from captured(scanner)) is None:
                return False
        if not _is_name(name) or (only_known and arguments is None):
            return False
        yield from _whole(calls, name or "", _as_object(arguments))
        scanner.drop()
        return True

    def _streamed(self, scanner: Scanner, calls: Calls, name: str, depth: int) -> Steps[None]:
        """Pass arguments on as they come, and read over what stands behind them in their object."""
        yield calls.start(name)
        scanner.drop()
        yield from calls.object(scanner)
        yield calls.end()
        while depth:
            following = yield from scanner.skip(BLANKS + ",")
            if following == "}":
                scanner.at += 1
                depth -= 1
            elif following == '"' and (yield from string(scanner)) is not None:
                if (yield from scanner.skip()) != ":":
                    break
                scanner.at += 1
                yield from scanner.skip()
                if (yield from captured(scanner)) is None:
                    break
            else:
                break
            scanner.drop()
        scanner.drop()


def _is_named_first(scanner: Scanner) -> Steps[bool]:
    """Whether the object that comes next begins with a name without escapes, or with its type before that."""
    start = scanner.at
    yield from scanner.take("{")
    yield from scanner.skip(BLANKS + ",")
    if (yield from _take_key(scanner, "type")) and (yield from scanner.take('"function"')):
        yield from scanner.skip(BLANKS + ",")
    named = yield from _take_key(scanner, "name")
    at = scanner.at
    name = (yield from string(scanner)) if named and (yield from scanner.next_is('"')) else None
    plain = name is not None and scanner.text[at : scanner.at] == quoted(name)
    scanner.at = start
    return plain


def _take_key(scanner: Scanner, key: str) -> Steps[bool]:
    """Read a key and what parts it from its value."""
    if not (yield from scanner.take(f'"{key}"')):
        return False
    yield from scanner.skip()
    colon = yield from scanner.take(":")
    yield from scanner.skip()
    return bool(colon)


def _is_name(name: str | None) -> bool:
    return name is not None and 0 < len(name.strip()) <= MAX_NAME


def _whole(calls: Calls, name: str, arguments: str) -> Iterator[Part]:
    yield calls.start(name)
    yield calls.arguments(arguments)
    yield calls.end()


def _as_object(arguments: str | None) -> str:
    """Arguments that were written before the name, as text, or not at all."""
    value = json.loads(arguments) if arguments is not None else None
    if isinstance(value, str):
        return value
    return "{}" if value is None else arguments or "{}"
