"""Calls as Gemma 4 writes them: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from gateway.reply_calls import MAX_NAME, Calls
from gateway.reply_scanner import Markers, Scanner, Steps

QUOTE = '<|"|>'
_QUOTES = Markers((QUOTE,))
_BARE_WORD = re.compile(r"[^\s,:{}\[\]\"<]*")
_NUMBER_OR_LITERAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_NONE = "None"  # templates write null so
_STRUCTURE = "{}[]:,"


@dataclass(frozen=True, slots=True)
class GemmaNotation:
    """JSON with bare keys, and with a token for the quotes of strings, in which nothing is escaped."""

    openers: tuple[str, ...] = ("<|tool_call>",)
    closers: tuple[str, ...] = ("<tool_call|>",)
    inner: tuple[str, ...] = (QUOTE,)
    bare: bool = False

    def section(self, scanner: Scanner, calls: Calls, opener: str) -> Steps[bool]:
        """See `Notation`."""
        yield from scanner.skip()
        if not (yield from scanner.take("call:")):
            return False
        header, marker = yield from scanner.until(Markers("{"), MAX_NAME)
        if not marker or not re.fullmatch(r"[^\s{}\[\]<>]+", header.strip()):
            return False
        yield calls.start(header.strip())
        scanner.at -= 1
        scanner.drop()
        yield from self._object(scanner, calls)
        yield calls.end()
        yield from scanner.skip()
        yield from scanner.take(*self.closers)
        scanner.drop()
        return True

    def _object(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """Pass on the object that comes next as JSON, up to its end or to what cannot be one."""
        depth = 0
        while True:
            following = yield from scanner.skip()
            if not following:
                return
            if following in _STRUCTURE:
                scanner.at += 1
                depth += (following in "{[") - (following in "}]")
                yield calls.arguments(following + " " * (following in ":,"))
                scanner.drop()
                if not depth:
                    return
            elif (yield from scanner.take(QUOTE)):
                yield calls.arguments('"')
                yield from self._text(scanner, calls)
            elif following == '"':
                yield from calls.object(scanner)
            elif following == "<":
                scanner.drop_half(QUOTE)
                return
            else:
                yield from self._word(scanner, calls)

    def _text(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """A string up to its closing quote, as it comes."""
        while True:
            at, marker = _QUOTES.find(scanner.text, scanner.at)
            yield from calls.escaped(scanner.text[scanner.at : at])
            scanner.at = len(scanner.text) if scanner.ended and not marker else at + len(marker)
            scanner.drop()
            if marker:
                yield calls.arguments('"')
            if marker or scanner.ended:
                return
            yield None

    def _word(self, scanner: Scanner, calls: Calls) -> Steps[None]:
        """A key, a number, a literal, or a string whose quotes were forgotten."""
        while True:
            found = _BARE_WORD.match(scanner.text, scanner.at)
            end = found.end() if found else scanner.at
            if end < len(scanner.text) or scanner.ended:
                break
            yield None
        end = max(end, scanner.at + 1)
        word = scanner.text[scanner.at : end]
        scanner.at = end
        is_key = (yield from scanner.skip()) == ":"
        if word == _NONE and not is_key:
            word = "null"
        literal = not is_key and _NUMBER_OR_LITERAL.fullmatch(word)
        yield calls.arguments(word if literal else json.dumps(word, ensure_ascii=False))
        scanner.drop()


def bare_key(key: str) -> str:
    """A key as it is written: between quotes only where it could not be told from structure."""
    return key if key and _BARE_WORD.fullmatch(key) else QUOTE + key + QUOTE


def bare_text(value: Any) -> str:
    """A JSON value in this notation. No string in it may hold the token for quotes."""
    match value:
        case str():
            return QUOTE + value + QUOTE
        case dict():
            return "{" + ",".join(f"{bare_key(key)}:{bare_text(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(bare_text, value)) + "]"
    return json.dumps(value)
