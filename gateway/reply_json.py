"""JSON that arrives in pieces: one value at a time, passed on as it was written."""

from __future__ import annotations

import json
import re

from gateway.reply_scanner import Scanner, Steps

_IN_STRING = re.compile(r'["\\]')
_IN_STRUCTURE = re.compile(r'["{}\[\]<`]')
_SCALAR_END = re.compile(r"[\s,\]}<`]")


class JsonValue:
    """Follows one value through its text. Once `closed` it is complete; `broken` means no JSON goes on like this."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._scalar = False
        self.closed = self.broken = False

    def advance(self, text: str, at: int) -> int:
        """Read on from `at`, where the value begins or goes on; the position behind what belongs to it."""
        while at < len(text) and not self.closed and not self.broken:
            if self._in_string:
                at = self._string(text, at)
            elif self._depth:
                at = self._structure(text, at)
            else:
                at = self._scalar_or_first(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found.group() == "\\"
        if not self._escaped:
            self._in_string = False
            self.closed = not self._depth
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _IN_STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        match found.group():
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.closed = not self._depth
            case _:  # a marker's beginning: the call ends here, whatever was open
                self.broken = True
                return found.start()
        return found.end()

    def _scalar_or_first(self, text: str, at: int) -> int:
        first = text[at]
        if not self._scalar and first in '"{[':
            self._in_string, self._depth = first == '"', int(first != '"')
            return at + 1
        self._scalar = True
        found = _SCALAR_END.search(text, at)
        if found is None:
            return len(text)
        self.closed = True
        return found.start()


def quoted(text: str) -> str:
    """A string as models write it: with no more escapes than it needs."""
    return json.dumps(text, ensure_ascii=False)


def captured(scanner: Scanner) -> Steps[str | None]:
    """The text of the value that comes next; None where it is none or ends early."""
    value, start = JsonValue(), scanner.at
    while True:
        scanner.at = value.advance(scanner.text, scanner.at)
        if value.closed or scanner.ended:
            break
        if value.broken:
            return None
        yield None
    text = scanner.text[start : scanner.at]
    return text if _parses(text) else None


def string(scanner: Scanner) -> Steps[str | None]:
    """The string that comes next; None where it is none or ends early."""
    text = yield from captured(scanner)
    value = json.loads(text) if text is not None else None
    return value if isinstance(value, str) else None


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
