"""What a pre-tokenizer's pattern can hold in one match: which characters next to one another.

Patterns are read as far as tokenizers use them; anything else is refused, never guessed. Looked at are the characters
of ASCII, each by itself, and some ranges of letters of which no pattern tells one from the other. Sets of them are
integers, with a bit for each.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

_LETTERS = ("ÀÖ", "ØÞ", "ßö", "øÿ", "ΑΡ", "ΣΩ", "αω", "ЁЏ", "АЯ", "ая", "ёџ", "ぁゖ", "ァヺ", "一龥", "가힣")
_STOPS = ("、。", "！！", "，，", "：；", "？？")


class Kind(NamedTuple):
    """Characters from `first` to `last`, all of one category, that patterns do not tell apart."""

    first: str
    last: str
    category: str

    @property
    def is_word(self) -> bool:
        """Whether it is a letter or a digit."""
        return self.category[0] in "LN"

    @property
    def pattern(self) -> str:
        """What it is inside the brackets of a pattern."""
        return re.escape(self.first) if self.first == self.last else f"{self.first}-{self.last}"


KINDS = tuple(
    Kind(first, last, unicodedata.category(first))
    for first, last in [*((chr(code), chr(code)) for code in range(128)), *map(tuple, (*_LETTERS, *_STOPS))]
)
ALL = (1 << len(KINDS)) - 1


def kinds(holds: Callable[[Kind], bool]) -> int:
    """The set of those for which `holds` is true."""
    return sum(1 << at for at, kind in enumerate(KINDS) if holds(kind))


BLANKS = kinds(lambda kind: kind.first in "\t\n\v\f\r ")  # what `\s` means there: Python has four more
_SETS = {
    "s": BLANKS,
    "d": kinds(lambda kind: kind.category == "Nd"),
    "w": kinds(lambda kind: kind.is_word or kind.first == "_"),
}
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}
_SCRIPTS = {"Han": "一", "Hiragana": "ぁ", "Katakana": "ァ", "Hangul": "가"}
_PROPERTY = re.compile(r"\{(\^?)(\w+)\}")
_RANGE = re.compile(r"(\\\W|[^\\\]])-(\\\W|[^\\\]])", re.DOTALL)
_TIMES = re.compile(r"\{(\d+)(,?)(\d*)\}")


class UnreadPattern(ValueError):
    """A pattern with something in it that is not understood here."""


class Adjacent(NamedTuple):
    """`held[one]` are the characters that may follow `one` within a match, or on which a match that has just taken
    `one` may depend; at any of `begun` a match is found whatever follows.
    """

    held: tuple[int, ...]
    begun: int


class _Part(NamedTuple):
    """Of a pattern: the places where it may begin and end, and whether it may match nothing.

    `begun` are characters at which it matches; `skipped`: it may match nothing; `free`: it matches, if only nothing.
    Those hold whatever stands around, which `empty` does not say.
    """

    first: frozenset[int]
    last: frozenset[int]
    empty: bool
    begun: int
    skipped: bool
    free: bool


_NOTHING = _Part(frozenset(), frozenset(), True, 0, True, True)


def adjacent(pattern: str) -> Adjacent:
    """Raises `UnreadPattern`."""
    reader = _Reader(pattern)
    whole = reader.choice(False)
    if reader.at < len(pattern) or whole.empty:
        raise UnreadPattern(pattern)
    held = [0] * len(KINDS)
    for place, following in enumerate(reader.after):
        may_follow = 0
        for other in following:
            may_follow |= reader.looks.get(other, reader.sets[other])
        for one in range(len(KINDS)):
            if reader.sets[place] >> one & 1:
                held[one] |= may_follow
    return Adjacent(tuple(held), whole.begun)


class _Reader:
    """Reads a pattern from `at` on. Each place in it that matches one character has a set, and places after it."""

    def __init__(self, pattern: str) -> None:
        self.at = 0
        self.sets: list[int] = []
        self.after: list[set[int]] = []
        self.looks: dict[int, int] = {}  # places that only look: the next characters on which they depend
        self._pattern = pattern

    def choice(self, folded: bool) -> _Part:
        """Alternatives, up to the end or a closing bracket; `folded`: in capitals or not."""
        made = self._sequence(folded)
        while self._takes("|"):
            other = self._sequence(folded)
            made = _Part(
                made.first | other.first,
                made.last | other.last,
                made.empty or other.empty,
                made.begun | other.begun,
                made.skipped or other.skipped,
                made.free or other.free,
            )
        return made

    def _sequence(self, folded: bool) -> _Part:
        made = _NOTHING
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            part = self._repeated(self._one(folded))
            self._follow(made.last, part.first)
            made = _Part(
                made.first | part.first if made.empty else made.first,
                made.last | part.last if part.empty else part.last,
                made.empty and part.empty,
                (made.begun if part.free else 0) | (part.begun if made.skipped else 0),
                made.skipped and part.skipped,
                made.free and part.free,
            )
        return made

    def _one(self, folded: bool) -> _Part:
        if self._takes("(?!\\S)"):
            return self._look(ALL & ~BLANKS)
        if self._takes("$"):
            return self._look(ALL)
        if self._takes("("):
            if self._takes("?i:"):
                folded = True
            elif not self._takes("?:") and self._pattern.startswith(("?", "*"), self.at):
                raise UnreadPattern(self._pattern)
            made = self.choice(folded)
            if not self._takes(")"):
                raise UnreadPattern(self._pattern)
            return made
        if self._takes("["):
            return self._place(self._class(folded))
        if self._pattern[self.at] in "^.?*+{":
            raise UnreadPattern(self._pattern)
        return self._place(self._set(folded))

    def _class(self, folded: bool) -> int:
        inverse, members = self._takes("^"), 0
        begin = self.at
        while not self._takes("]"):
            if self.at == len(self._pattern) or self._pattern.startswith(("[", "&&"), self.at):
                raise UnreadPattern(self._pattern)
            if found := _RANGE.match(self._pattern, self.at):
                if folded:
                    raise UnreadPattern(self._pattern)
                self.at = found.end()
                members |= self._between(found[1][-1], found[2][-1])
            else:
                members |= self._set(folded)
        if self.at == begin + 1:  # the bracket may be meant as a member
            raise UnreadPattern(self._pattern)
        return ALL & ~members if inverse else members

    def _between(self, low: str, high: str) -> int:
        members = kinds(lambda kind: low <= kind.first and kind.last <= high)
        if members != kinds(lambda kind: low <= kind.last and kind.first <= high):  # it parts one
            raise UnreadPattern(self._pattern)
        return members

    def _set(self, folded: bool) -> int:
        """Of one character, escaped or not."""
        character = self._pattern[self.at]
        self.at += 1
        if character != "\\":
            return self._literal(character, folded)
        name = self._pattern[self.at : self.at + 1]
        self.at += 1
        if name in ("p", "P"):
            found = _PROPERTY.match(self._pattern, self.at)
            if found is None:
                raise UnreadPattern(self._pattern)
            self.at = found.end()
            members = self._property(found[2])
            return ALL & ~members if (name == "P") != bool(found[1]) else members
        if name.lower() in _SETS and name:
            return _SETS[name] if name in _SETS else ALL & ~_SETS[name.lower()]
        if name in _CONTROLS:
            return self._literal(_CONTROLS[name], False)
        if not name or name.isalnum() or not name.isascii():
            raise UnreadPattern(self._pattern)
        return self._literal(name, False)

    def _literal(self, character: str, folded: bool) -> int:
        if not folded:
            return 1 << ord(character) if character.isascii() else self._between(character, character)
        if not character.isascii():  # some are the same as several others
            raise UnreadPattern(self._pattern)
        return kinds(lambda kind: kind.first in (character, character.swapcase()))

    def _property(self, name: str) -> int:
        if name in _SCRIPTS:
            return kinds(lambda kind: kind.first == _SCRIPTS[name])
        if len(name) > 2 or name[0] not in "LMNPSZC":
            raise UnreadPattern(self._pattern)
        return kinds(lambda kind: kind.category.startswith(name))

    def _repeated(self, part: _Part) -> _Part:
        """With what says how often. What is kept once it is taken cannot be skipped for the sake of what follows."""
        if found := _TIMES.match(self._pattern, self.at):
            self.at = found.end()
            least, most = int(found[1]), int(found[3] or 0) if found[2] else int(found[1])
            if self._pattern.startswith("?", self.at) or (found[2] and found[3] and most < least):
                raise UnreadPattern(self._pattern)
            self._takes("+")  # means again and again
            self._follow(part.last, part.first)
            return part._replace(
                empty=part.empty or not least,
                begun=part.begun if least <= 1 else 0,
                skipped=part.skipped or not least,
                free=part.free or not least,
            )
        mark = next((mark for mark in "?*+" if self._takes(mark)), "")
        if not mark:
            return part
        keeps = not self._takes("?") and self._takes("+")
        if mark != "?":
            self._follow(part.last, part.first)
        if mark == "+":
            return part._replace(skipped=part.skipped and not keeps)
        return part._replace(empty=True, skipped=not keeps, free=True)

    def _place(self, members: int) -> _Part:
        self.sets.append(members)
        self.after.append(set())
        here = frozenset({len(self.sets) - 1})
        return _Part(here, here, False, members, False, False)

    def _look(self, depends_on: int) -> _Part:
        place = self._place(0)
        self.looks[len(self.sets) - 1] = depends_on
        return place._replace(empty=True)

    def _follow(self, places: frozenset[int], others: frozenset[int]) -> None:
        for place in places:
            self.after[place] |= others

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True
