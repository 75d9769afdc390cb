"""Calls as tags, one for each argument: Qwen3-Coder and Qwen3.5, GLM, Laguna, Seed and others."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gateway.reply_calls import MAX_NAME, Calls, OpenedCalls
from gateway.reply_scanner import Markers, Scanner, Steps

_CDATA, _CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class TagNotation(OpenedCalls):
    """`call` name `name_end` (`key` name `key_end` `value` text `value_end`)* `end`, in a section or not.

    `padded`: a line break on either side of a value is not part of it. `cdata`: values may be CDATA sections. Values
    have no type of their own: the tool's schema decides. Where a value holds the very tag that ends values, the one
    that a further tag follows counts.
    """

    call: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    end: str
    value: str = ""
    section_open: str = ""
    section_end: str = ""
    padded: bool = False
    cdata: bool = False
    bare: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        return (self.key, self.key_end, self.value, self.value_end)

    def _call(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        header, marker = yield from scanner.until(Markers((self.name_end, self.key, self.end)), MAX_NAME)
        name = header.strip()
        if not marker or not name or any(c in name for c in "<>{}\n"):
            return False
        scanner.at -= len(marker) if marker != self.name_end else 0
        yield calls.start(name)
        scanner.drop()
        first = True
        while (yield from self._next_key(scanner)):
            key, marker = yield from scanner.until(Markers((self.key_end,)), MAX_NAME)
            if not marker:
                break
            if self.value:
                yield from scanner.skip()
                yield from scanner.take(self.value)
                scanner.drop_half(self.value)
            written = json.dumps(key.strip(), ensure_ascii=False)
            yield calls.arguments(f"{'{' if first else ', '}{written}: ")
            first = False
            if not (yield from self._value(scanner, calls, name, key.strip())):
                break
        scanner.drop_half(self.key, *self.closers)
        if not scanner.exhausted:  # it was not cut off
            yield calls.arguments("{}" if first else "}")
        yield calls.end()
        yield from scanner.take(self.end)
        scanner.drop()
        return True

    def _next_key(self, scanner: Scanner) -> Steps[str]:
        yield from scanner.skip()
        return (yield from scanner.take(self.key))

    def _value(self, scanner: Scanner, calls: Calls, name: str, key: str) -> Steps[bool]:
        """One value; whether it is whole. Strings are passed on as they come, others at their end."""
        if self.padded:
            yield from scanner.take("\n")
        scanner.drop()
        streamed = calls.types(name, key) == {"string"}
        if streamed:
            yield calls.arguments('"')
        ends = Markers((("\n" if self.padded else "") + self.value_end, self.value_end))
        if self.cdata and (yield from scanner.take(_CDATA)):
            ends = Markers((_CDATA_END + self.value_end,))
        held: list[str] = []
        while True:
            at, marker = ends.find(scanner.text, scanner.at)
            ends_here = scanner.ended and not marker  # then half a tag is no part of the value
            pieces = [scanner.text[scanner.at : at]]
            scanner.at = len(scanner.text) if ends_here else at + len(marker)
            scanner.drop()
            whole = bool(marker) and (yield from self._goes_on(scanner))
            if marker and not whole:
                pieces.append(marker)
            if streamed:
                yield from calls.escaped("".join(pieces))
            else:
                held += pieces
            if whole:
                break
            if ends_here:
                return False
            if not marker:
                yield None
        value = json.dumps(calls.typed(name, key, "".join(held)), ensure_ascii=False)
        yield calls.arguments('"' if streamed else value)
        return True

    def _goes_on(self, scanner: Scanner) -> Steps[bool]:
        """Whether what follows a value is the next tag, or nothing."""
        start = scanner.at
        following = (self.key, self.call, *self.closers)
        yield from scanner.skip()
        found = yield from scanner.next_is(*following)
        scanner.drop_half(*following)
        if found or scanner.exhausted:
            return True
        scanner.at = start
        return False
