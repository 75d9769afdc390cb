"""Texts that were encoded lately, so that one that goes on from them is encoded from where it does.

An agent sends its whole history each turn. Remembering each piece between added tokens spares encoding it, but
finding the pieces still means to search the history for added tokens, a quarter of the gateway's time at 32k tokens.
Comparing it with what came before takes the time of reading it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from gateway.recent import Recent

_ENTRY_BYTES = 64 << 20
_TRIED = 16  # wanted positions, from the last one back, at which a text may go on from another
_KEYS = 4  # wanted positions, from the last one back, by which it can be found: its end may be said differently
_TAIL = 32  # characters before such a position by which texts are told apart before they are compared
_LEAST = 2048  # characters of a text that is worth it
_COMPARED = 8192  # characters that are compared at once

_Key = tuple[str, int, str, str]


class Known(NamedTuple):
    """The beginning of a text: its ids, the token counts at the wanted positions before its end, and its marks.

    Marks are text positions behind added tokens, with the tokens before them; the last is where the beginning ends.
    """

    token_ids: array[int]
    counts: list[int | None]
    marks: list[tuple[int, int]]


class _Entry(NamedTuple):
    text: str
    token_ids: array[int]
    marks: list[tuple[int, int]]
    counts: dict[int, int | None]  # at the wanted positions


class TextMemory:
    """Safe to use from several threads."""

    def __init__(self, reach: int, max_bytes: int = _ENTRY_BYTES) -> None:
        """`reach`: the length of the longest added token, which is how far the search for one looks ahead."""
        self._reach = reach
        self._recent: Recent[_Key, _Entry] = Recent(max_bytes)

    def find(self, text: str, positions: Sequence[int], sentinel: str = "", owner: str = "") -> Known | None:
        """The longest beginning of `text` that is known, with the token counts at all `positions` (rising) in it.

        `sentinel`: what was left out of it, and of what it is compared with; `owner`: whose both are.
        """
        for position in positions[: -_TRIED - 1 : -1]:
            entry = self._recent.get(_key(text, position, sentinel, owner))
            if entry is not None:
                return self._shared(entry, text, positions)
        return None

    def _shared(self, entry: _Entry, text: str, positions: Sequence[int]) -> Known | None:
        same = common_prefix(entry.text, text)
        counts: list[int | None] = []
        for position in positions:
            if position not in entry.counts:
                same = min(same, position + self._reach)
                break
            counts.append(entry.counts[position])
        # Whether an added token ends at a mark was decided by what stands before it and `reach` characters behind.
        marks = entry.marks[: bisect_right(entry.marks, same - self._reach, key=itemgetter(0))]
        if not marks:
            return None
        end, tokens = marks[-1]
        known = sum(position < end for position in positions[: len(counts)])
        return Known(entry.token_ids[:tokens], counts[:known], marks)

    def keep(
        self,
        text: str,
        token_ids: array[int],
        marks: list[tuple[int, int]],
        positions: Sequence[int],
        counts: Sequence[int | None],
        sentinel: str = "",
        owner: str = "",
    ) -> None:
        """Remember a text by the last of its `positions`. The arrays and lists are not copied."""
        if len(text) < _LEAST or not positions or not marks:
            return
        size = 4 * len(text) + 4 * len(token_ids) + 200 * (len(marks) + len(positions))
        entry = _Entry(text, token_ids, marks, dict(zip(positions, counts, strict=True)))
        self._recent.keep(entry, [_key(text, position, sentinel, owner) for position in positions[-_KEYS:]], size)


def _key(text: str, position: int, sentinel: str, owner: str) -> _Key:
    return owner, position, text[max(position - _TAIL, 0) : position], sentinel


def common_prefix(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    if one.startswith(other):
        return len(other)
    at, end = 0, min(len(one), len(other))
    while one.startswith(other[at : at + _COMPARED], at) and at < end:  # pieces that stay in a core's memory
        at += _COMPARED
    low, high = min(at, end), min(at + _COMPARED, end)
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
