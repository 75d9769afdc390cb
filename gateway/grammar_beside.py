"""The grammar of answers in which tools may be called: any text, and where a call begins, a call as it must be.

A call begins where the reader of answers sees one begin, so no text holds that. All else goes as it would without a
grammar: reasoning and the special tokens that part an answer may stand wherever the model likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.call_layout import AnswerLayout, CallLayout
from gateway.grammar_lark import Lark, any_of, pattern
from gateway.reply_json import quoted

_ANY, _MORE = r"(.|\n)*", r"(.|\n)+"
# As `JsonNotation` reads over them, between keys and elsewhere.
_COMMAS, _BLANKS = r"[ \t\r\n,]*", r"[ \t\r\n]*"
_NAMED = rf'{_BLANKS}\{{{_COMMAS}("type"{_BLANKS}:{_BLANKS}"function"{_COMMAS})?"name"{_BLANKS}:{_BLANKS}'
_SOME_BLANKS = r"[ \t\r\n]{0,20}"
_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


class Callee(NamedTuple):
    """A tool that may be called, and the name of the rule of its arguments."""

    name: str
    arguments: str


def beside_text(
    lark: Lark, layout: AnswerLayout, callees: Sequence[Callee], calls: Callable[[CallLayout], str]
) -> str:
    """Text alone, or up to where calls begin, and these. `calls` writes the rule of calls in a spelling."""
    return _Beside(lark, layout, callees).written(calls)


class _Beside:
    """`_begun` are patterns of all that an answer may be when a call has just begun in it."""

    def __init__(self, lark: Lark, layout: AnswerLayout, callees: Sequence[Callee]) -> None:
        self._lark, self._layout, self._callees = lark, layout, callees
        self._begun = [f"{_ANY}({_one_of(layout.openers)})"]
        if layout.bare is not None:
            self._begun.append(self._bare(*(callee.name for callee in callees)))

    def written(self, calls: Callable[[CallLayout], str]) -> str:
        lark = self._lark
        text = self._text()
        marks = dict.fromkeys(lark.special(self._layout.markers), text)  # with what may stand before each
        ends = [text]
        spelled = _spelled(self._layout)
        for opener in self._layout.openers:
            rule = any_of(map(calls, spelled.get(opener, ())))
            first, *others = lark.pieces(opener)
            if isinstance(first, int):
                marks.pop(first, None)
                before = f"{text} {lark.text(opener)}"
            elif not others:
                before = self._just(_ANY + pattern(opener))
            else:  # text and then a special token, which may come behind any other text
                last, (token, *_) = _ANY + pattern(first), others
                assert isinstance(token, int)
                marks[token] = self._text(but=last)
                before = f"{self._text(last)} {lark.text(opener.removeprefix(first))}"
            if opener in spelled:
                ends.append(f"{before} {rule}")
        if self._layout.bare is not None:
            ends += self._bare_calls(self._layout.bare)
        parts = any_of(f"{before} <[{token}]>" for token, before in marks.items())
        return f"{parts}* {any_of(ends)}" if marks else any_of(ends)

    def _text(self, of: str = _ANY, *, but: str | None = None) -> str:
        """Text of a pattern in which no call begins. Special tokens are no text."""
        excluded = [begun + _ANY for begun in self._begun]
        return self._lark.terminal(of, excluded if but is None else [*excluded, but])

    def _just(self, begun: str) -> str:
        """What has a call begun with its last character, and no sooner."""
        return self._lark.terminal(begun, [each + _MORE for each in self._begun])

    def _bare(self, *names: str) -> str:
        """An answer, or what follows its reasoning, with the name of a tool as the first thing in an object."""
        close = self._layout.close
        thought = f"({_ANY}{pattern(close)})?" if close else ""
        return f"{thought}{_NAMED}({_one_of(map(quoted, names))})"

    def _bare_calls(self, spelling: CallLayout) -> Iterator[str]:
        """A call of each tool, with blanks wherever JSON has a place for them."""
        between, after = (self._blank(text) for text in (spelling.between.removeprefix('"'), spelling.after))
        for callee in self._callees:
            yield f"{self._just(self._bare(callee.name))} {between} {callee.arguments} {after}"

    def _blank(self, text: str) -> str:
        return self._lark.rule(f"/{_SOME_BLANKS.join(('', *map(pattern, _JSON.findall(text)), ''))}/")


def _spelled(layout: AnswerLayout) -> dict[str, list[CallLayout]]:
    """By each opener how calls go on behind it. What stands before it is text, or parts an answer."""
    found: dict[str, list[CallLayout]] = {}
    for spelling in layout.calls:
        before = spelling.before
        at, opener = min(((before.index(o), o) for o in layout.openers if o in before), default=(0, ""))
        if opener:
            found.setdefault(opener, []).append(replace(spelling, before=before[at + len(opener) :]))
    if layout.bare is not None:
        found.setdefault(layout.openers[0], []).append(layout.bare)
    return found


def _one_of(texts: Iterable[str]) -> str:
    return "|".join(map(pattern, texts))
