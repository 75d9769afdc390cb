"""Text that arrives in pieces, read by generators that ask for more where what is there cannot decide.

Readers decide by the text alone, never by where a piece ended, and yield parts as soon as they are certain.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

from gateway.reply import Part

_Result = TypeVar("_Result")
# Yields parts, and None where it needs more text; it is resumed once there is some, or none will come.
Steps = Generator[Part | None, None, _Result]

BLANKS = " \t\r\n"


class Markers:
    """Looks for any of several strings. No marker may be the beginning of another one."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        self._beginnings = {marker[:n] for marker in self.markers for n in range(1, len(marker))}
        self._longest = max(map(len, self.markers), default=1) - 1

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Where the first marker stands, and which; or where what could still become one begins, and ""."""
        at, found = min(
            ((at, m) for m in self.markers if (at := text.find(m, start)) >= 0), default=(len(text), "")
        )
        for length in range(min(self._longest, len(text) - start), len(text) - at, -1):
            if text[-length:] in self._beginnings:  # it may become one that begins before the one found
                return len(text) - length, ""
        return at, found


class Scanner:
    """The text not yet dropped, and how far it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def feed(self, text: str) -> None:
        self.text += text

    def drop(self) -> None:
        """Forget what has been read: positions kept from before are void."""
        self.text, self.at = self.text[self.at :], 0

    @property
    def exhausted(self) -> bool:
        """Everything has been read, and nothing will come."""
        return self.ended and self.at >= len(self.text)

    def drop_half(self, *markers: str) -> None:
        """Read over the beginning of one of some strings if that is all that is left of an answer cut off there."""
        rest = self.text[self.at :]
        if self.ended and any(marker != rest and marker.startswith(rest) for marker in markers):
            self.at = len(self.text)

    def skip(self, characters: str = BLANKS) -> Steps[str]:
        """Read over characters; the one that comes next, or "" at the end."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in characters:
                    return self.text[self.at]
                self.at += 1
            if self.ended:
                return ""
            yield None

    def next_is(self, *markers: str) -> Steps[str]:
        """Which of some strings comes next, or "". Nothing is read; none may be the beginning of another."""
        while True:
            for marker in markers:
                if marker and self.text.startswith(marker, self.at):
                    return marker
            rest = self.text[self.at :]
            if self.ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield None

    def take(self, *markers: str) -> Steps[str]:
        """Read one of some strings if it comes next; which, or ""."""
        found = yield from self.next_is(*markers)
        self.at += len(found)
        return found

    def until(self, markers: Markers, limit: int | None = None) -> Steps[tuple[str, str]]:
        """Read up to and over a marker: what stood before it, and which it was.

        The marker is "" where none comes, or not within `limit` characters; then all that was looked at is read.
        """
        start = self.at
        while True:
            at, marker = markers.find(self.text, self.at)
            if limit is not None and at - start > limit:
                self.at = at
                return self.text[start:at], ""
            if marker or self.ended:
                before = self.text[start : at if marker else len(self.text)]
                self.at = start + len(before) + len(marker)
                return before, marker
            self.at = at
            yield None
