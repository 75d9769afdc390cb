"""Finds how a template spells one call and several in what it makes of probes: forced calls are spelled so too."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

from gateway.call_layout import CALL_ID, COUNT, NAMED, Again, AnswerLayout, Bare, CallLayout, Tags
from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Renderer
from gateway.reply import Reply
from gateway.reply_call_gemma import QUOTE, GemmaNotation
from gateway.reply_call_named import NamedNotation
from gateway.reply_call_tags import TagNotation
from gateway.reply_calls import Calls, Notation
from gateway.reply_formats import markers
from gateway.reply_parser import StreamParser, Thinking

_NAME, _WORD = "probe_function", "wordprobe"
_PROBES = tuple(
    ToolCall(f"call_{letter * 16}", _NAME, {"word": _WORD, "number": number})
    for number, letter in ((7, "a"), (8, "b"), (9, "c"))
)
_KINDS = {"word": "string", "number": "integer"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": key} for key, kind in _KINDS.items()},
        },
    },
}
_USER, _WHY, _SAID = Message("user", "userprobe"), "whyprobe", "saidprobe"
_RESULT = "resultprobe"
_DIGITS = re.compile(r"(\d+)")


def find_layout(renderer: Renderer, notation: Notation | None, thinking: Thinking | None = None) -> AnswerLayout:
    """The spellings in a template. A call's is left out where it is not read back as it is meant."""
    probes = _Probes(renderer, thinking)
    parts_answers = thinking is not None and bool(thinking.silent)
    said = probes.said() if parts_answers else ""
    if notation is None:
        return AnswerLayout((), said, probes.resumed("") if parts_answers else None)
    end = renderer.habits.end_before_calls

    def is_read(layout: CallLayout) -> bool:
        return _is_read(layout, notation, thinking, end)

    taken = (_taken(text, start, notation, renderer) for text, start in probes.calling(1))
    found = next((x for x in taken if x is not None and is_read(x)), None)
    if found is None:
        return AnswerLayout((), said, probes.resumed("") if parts_answers else None)
    for text, _ in () if renderer.habits.calls_in_turn else probes.calling(len(_PROBES)):
        several = _several(text, found)
        if several is not None and is_read(several):
            found = several
            break
    spellings = notation.also if isinstance(notation, NamedNotation) else ()
    also = (replace(found, before=before, between=between) for before, between in spellings)
    calls = (found, *(other for other in also if is_read(other)))
    resumed = probes.resumed(found.before) if parts_answers else None
    bare = _bare(found, notation) if notation.bare else None
    if bare is None and (notation.bare or not any(opener in found.before for opener in notation.openers)):
        return AnswerLayout(calls, said, resumed)
    close = "" if thinking is None else thinking.close
    return AnswerLayout(calls, said, resumed, notation.openers, bare, close, markers(notation, thinking, end))


def _bare(found: CallLayout, notation: Notation) -> CallLayout | None:
    """How calls are spelled that have no opener: the name comes first in their object, so that it says what follows."""
    opener = next((opener for opener in notation.openers if found.before.startswith(opener)), "")
    before = found.before.removeprefix(opener).lstrip()
    named = before.replace(" ", "") == '{"name":"' and found.between.startswith('"')
    return replace(found, before=before) if named else None


class _Probes:
    """What a template makes of answers of several kinds."""

    def __init__(self, renderer: Renderer, thinking: Thinking | None) -> None:
        self._renderer = renderer
        self._thinking = thinking
        self._asked = self._text((_USER,), reply=True) or ""

    def calling(self, count: int) -> list[tuple[str, int]]:
        """Calls, at the end or with their results behind them, as far as the template takes it.

        With where the answer begins, if that is not where an opener is found.
        """
        calls = _PROBES[:count]
        texts: list[tuple[str, int]] = []
        for results in ((), tuple(Message("tool", _RESULT, tool_call_id=call.id) for call in calls)):
            text = self._text((_USER, Message("assistant", "", calls), *results))
            if text is not None:
                for call in calls:
                    text = text.replace(call.id, CALL_ID)
                texts.append((text.partition(_RESULT)[0], self._start(text)))
        return texts

    def _start(self, text: str) -> int:
        """Behind the prompt, where anything may stand around a call that says what kind of text it is."""
        parted = self._thinking is not None and self._thinking.anywhere
        return len(self._asked) if parted and self._asked and text.startswith(self._asked) else -1

    def said(self) -> str | None:
        """What stands before the text of an answer."""
        text = self._text((_USER, Message("assistant", _SAID)))
        before, found, _ = (text or "").partition(_SAID)
        if not found or self._thinking is None:
            return None
        if self._asked and before.startswith(self._asked):
            return before[len(self._asked) :]
        start = len(before)
        while marker := next((m for m in self._thinking.silent if before.endswith(m, 0, start)), ""):
            start -= len(marker)
        return before[start:]

    def resumed(self, before_call: str) -> str | None:
        """What stands between the end of reasoning and a call, or text."""
        assert self._thinking is not None
        call = _PROBES[0]
        chats: list[tuple[tuple[Message, ...], str]] = [
            ((_USER, Message("assistant", _SAID, reasoning=_WHY)), (self.said() or "") + _SAID)
        ]
        if before_call:
            calling = (_USER, Message("assistant", "", (call,), reasoning=_WHY), Message("tool", _RESULT))
            chats.insert(0, (calling, before_call.replace(CALL_ID, call.id).replace(NAMED, _NAME) + _NAME))
        for messages, following in chats:
            text = (self._text(messages) or "").partition(_WHY)[2].lstrip()
            close = self._thinking.close
            at = text.find(following)
            if at >= 0 and text.startswith(close):
                return text[len(close) : at]
        return None

    def _text(self, messages: tuple[Message, ...], *, reply: bool = False) -> str | None:
        try:
            text = self._renderer.run(Conversation(messages, (_TOOL,)), reply).text
        except Exception:  # whatever a foreign template's code raises means: not like this
            return None
        return text[text.rfind(_USER.content) + len(_USER.content) :]


def _taken(text: str, start: int, notation: Notation, renderer: Renderer) -> CallLayout | None:
    name = text.rfind(_NAME, 0, max(text.find(_WORD), 0))
    if start < 0:
        starts = [at for opener in notation.openers if (at := text.find(opener, 0, name)) >= 0]
        start = min(starts, default=text.find("{", 0, name) if notation.bare else -1)
        end = renderer.habits.end_before_calls
        if end and text[: max(start, 0)].rstrip().endswith(end):
            start = text.rindex(end, 0, start)
    if name < 0 or start < 0:
        return None
    before, rest = text[start:name].replace(_NAME, NAMED), text[name + len(_NAME) :]
    if isinstance(notation, TagNotation):
        found = _tagged(before, rest, notation.key)
    else:
        values = (Bare(QUOTE, False), Bare(QUOTE, True)) if isinstance(notation, GemmaNotation) else (None,)
        at = rest.find("{")
        layouts = (CallLayout(before, rest[: max(at, 0)], "", each) for each in values)
        found = next((x for x in layouts if x.behind(rest[max(at, 0) :], _PROBES[0].arguments) is not None), None)
        if found is not None:
            found = replace(found, after=found.behind(rest[at:], _PROBES[0].arguments) or "")
    if found is None:
        return None
    return replace(found, after=_ended(found.after, renderer.habits.end_of_turn.strip(), notation).rstrip())


def _ended(rest: str, end: str, notation: Notation) -> str:
    """Up to what ends an answer; where a template has nothing for that, or not behind calls, up to what ends a call."""
    if end and end in rest:
        return rest[: rest.index(end)]
    return rest[: max((rest.rfind(each) + len(each) for each in notation.closers if each in rest), default=0)]


def _tagged(before: str, rest: str, key: str) -> CallLayout | None:
    """The parts between two keys and their values, each of which must come out the same both times."""
    between, opened, rest = rest.partition(key)
    first, found, rest = rest.partition(_WORD)
    close, again, rest = rest.partition(key)
    middle = first.removeprefix("word")
    second = f"number{middle}{_PROBES[0].arguments['number']}"
    if not (opened and found and again and close and middle) or first != "word" + middle:
        return None
    after = rest.removeprefix(second)
    if not rest.startswith(second) or not after.startswith(close):
        # The last value may lack the blanks that part it from a further one.
        return None
    return CallLayout(before, between, after.removeprefix(close), Tags(key, middle, close))


def _several(text: str, layout: CallLayout) -> CallLayout | None:
    """With how further calls are written. Two of them must come out alike, but for numbers, and the end as it was."""
    start = layout.before.replace(NAMED, _NAME) + _NAME + layout.between
    rest = text[text.find(start) + len(start) :] if start in text else ""
    found: list[Again] = []
    for call, following in pairwise(_PROBES):
        behind = layout.behind(rest, call.arguments) or ""
        name = behind.rfind(_NAME, 0, max(behind.find(_WORD), 0))
        rest = behind[name + len(_NAME) :]
        starts = (at for at in range(len(rest)) if layout.behind(rest[at:], following.arguments) is not None)
        at = next(starts, -1)
        if name < 0 or at < 0:
            return None
        found.append(Again(behind[:name].replace(_NAME, NAMED), rest[:at]))
        rest = rest[at:]
    last = layout.behind(rest, _PROBES[-1].arguments) or ""
    join, between = (_alike(first, second) for first, second in zip(*found, strict=True))
    after = _alike(layout.after, last[: len(layout.after)])
    if join is None or between is None or after is None:
        return None
    return replace(layout, after=after, again=Again(join, between))


def _alike(first: str, second: str) -> str | None:
    """Two texts as one, where they differ in nothing but numbers."""
    pieces, others = _DIGITS.split(first), _DIGITS.split(second)
    if pieces[::2] != others[::2]:
        return None
    return "".join(piece if piece == other else COUNT for piece, other in zip(pieces, others, strict=True))


def _is_read(layout: CallLayout, notation: Notation, thinking: Thinking | None, end: str) -> bool:
    """Whether exactly the calls that are written come out, with and without arguments."""
    arguments: list[list[dict[str, Any]]] = [[_PROBES[0].arguments], [{}]]
    if layout.again is not None:
        arguments.append([_PROBES[0].arguments, {}, _PROBES[1].arguments])
    for each in arguments:
        parser = StreamParser(thinking, notation, Calls((_TOOL,)), inside=False, one_call=False, end=end)
        text = layout.written(*((_NAME, one) for one in each))
        reply = Reply.of([*parser.feed(text), *parser.finish()])
        if reply.text or reply.reasoning or [call.value() for call in reply.calls] != each:
            return False
        if any(call.name != _NAME for call in reply.calls):
            return False
    return True
