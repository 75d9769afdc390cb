"""Calls as a name between markers and its arguments as JSON: newer Mistral models, Kimi, DeepSeek and others."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.reply_call_json import JsonNotation
from gateway.reply_calls import MAX_NAME, Calls, OpenedCalls
from gateway.reply_scanner import BLANKS, Markers, Scanner, Steps

_OBJECT = "{"
_FENCE = BLANKS + "`"


@dataclass(frozen=True, slots=True)
class NamedNotation(OpenedCalls):
    """`call` header `arguments` JSON `end`, in a section or not.

    The header holds the name: group 1 of `name`, a regular expression that matches all of it. `arguments` may be left
    out by the model where its JSON begins at once. `lists`: a section may also be a list of JSON calls. `also` are
    further spellings of what stands before and behind the name, which templates do not write but models do.
    """

    call: str
    name: str
    arguments: str
    end: str = ""
    section_open: str = ""
    section_end: str = ""
    lists: bool = False
    also: tuple[tuple[str, str], ...] = ()
    bare: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        return (self.arguments, "[CALL_ID]") if self.lists else (self.arguments,)

    @property
    def _end(self) -> str:
        """`end` without the fence before it, which models leave out."""
        return self.end.lstrip(_FENCE)

    def _call(self, scanner: Scanner, calls: Calls) -> Steps[bool]:
        if self.lists and (yield from scanner.skip()) in ("[", _OBJECT):
            return (yield from JsonNotation(self.openers).section(scanner, calls, self.call))
        ends = Markers(m for m in (self.arguments, _OBJECT, self._end) if m)
        header, marker = yield from scanner.until(ends, MAX_NAME)
        found = re.fullmatch(self.name, header.strip(), re.DOTALL) if marker else None
        if found is None:
            return False
        if marker == _OBJECT:
            scanner.at -= len(_OBJECT)
        yield calls.start(found.group(1))
        scanner.drop()
        following = yield from scanner.skip()
        if marker != self._end and following == _OBJECT:
            yield from calls.object(scanner)
        elif following or marker == self._end:
            yield calls.arguments("{}")
        yield calls.end()
        if self._end and marker != self._end:
            yield from scanner.skip(BLANKS if self.end == self._end else _FENCE)
            yield from scanner.take(self._end)
        scanner.drop()
        return True
