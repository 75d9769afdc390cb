"""How a template spells one call, taken from what it makes of a probe: forced calls are held to the same spelling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Renderer
from gateway.reply import Reply
from gateway.reply_call_tags import TagNotation
from gateway.reply_calls import Calls, Notation
from gateway.reply_parser import StreamParser

_NAME, _WORD = "probe_function", "wordprobe"
_ARGUMENTS = {"word": _WORD, "number": 7}
_CALL = ToolCall("call_0123456789abcdef", _NAME, _ARGUMENTS)
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
_USER = Message("user", "userprobe")
_RESULT = Message("tool", "resultprobe", tool_call_id=_CALL.id)


class Tags(NamedTuple):
    """What stands around the key and the value of one argument, where each has tags of its own."""

    open: str
    middle: str
    close: str


@dataclass(frozen=True, slots=True)
class CallLayout:
    """A call is `before` name `between` arguments `after`. The arguments are JSON unless they have `tags`."""

    before: str
    between: str
    after: str
    tags: Tags | None = None

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as the model would write it."""
        if self.tags is None:
            text = json.dumps(arguments, ensure_ascii=False)
        else:
            values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            text = "".join(self.tags.open + k + self.tags.middle + v + self.tags.close for k, v in values.items())
        return self.before + name + self.between + text + self.after


def find_layout(renderer: Renderer, notation: Notation | None) -> CallLayout | None:
    """The spelling of a notation in a template; None where it cannot be told, or is not read back as it is meant."""
    if notation is None:
        return None
    taken = (_taken(text, notation, renderer) for text in _texts(renderer))
    return next((layout for layout in taken if layout is not None and _is_read(layout, notation)), None)


def _texts(renderer: Renderer) -> list[str]:
    """A call, at the end or with its result behind it, as far as the template takes it."""
    texts: list[str] = []
    for behind in ((), (_RESULT,)):
        messages = (_USER, Message("assistant", "", (_CALL,)), *behind)
        try:
            text = renderer.run(Conversation(messages, (_TOOL,)), reply=False).text
        except Exception:  # whatever a foreign template's code raises means: not like this
            continue
        texts.append(text[text.rfind(_USER.content) + len(_USER.content) :].partition(_RESULT.content)[0])
    return texts


def _taken(text: str, notation: Notation, renderer: Renderer) -> CallLayout | None:
    name = text.find(_NAME)
    starts = [at for opener in notation.openers if (at := text.find(opener, 0, name)) >= 0]
    start = min(starts, default=text.find("{", 0, name) if notation.bare else -1)
    if name < 0 or start < 0:
        return None
    before, rest = text[start:name], text[name + len(_NAME) :]
    rest = _ended(rest, renderer.habits.end_of_turn.strip(), notation).rstrip()
    found = _tagged(before, rest, notation.key) if isinstance(notation, TagNotation) else _json(before, rest)
    fixed = "" if found is None else found.before + found.between + found.after
    return None if _CALL.id in fixed or _NAME in fixed else found


def _ended(rest: str, end: str, notation: Notation) -> str:
    """Up to what ends an answer; where a template has nothing for that, or not behind calls, up to what ends a call."""
    if end and end in rest:
        return rest[: rest.index(end)]
    return rest[: max((rest.rfind(each) + len(each) for each in notation.closers if each in rest), default=0)]


def _json(before: str, rest: str) -> CallLayout | None:
    at = rest.find("{")
    if at < 0:
        return None
    try:
        arguments, end = json.JSONDecoder().raw_decode(rest, at)
    except ValueError:
        return None
    return CallLayout(before, rest[:at], rest[end:]) if arguments == _ARGUMENTS else None


def _tagged(before: str, rest: str, key: str) -> CallLayout | None:
    """The parts between two keys and their values, each of which must come out the same both times."""
    between, opened, rest = rest.partition(key)
    first, found, rest = rest.partition(_WORD)
    close, again, rest = rest.partition(key)
    second, number, after = rest.rpartition(str(_ARGUMENTS["number"]))
    middle = first.removeprefix("word")
    if not (opened and found and again and number and close and middle):
        return None
    if second != "number" + middle or first != "word" + middle or not after.startswith(close):
        # The last value may lack the blanks that part it from a further one.
        return None
    return CallLayout(before, between, after.removeprefix(close), Tags(key, middle, close))


def _is_read(layout: CallLayout, notation: Notation) -> bool:
    """Whether exactly the calls that are written come out, with and without arguments."""
    for arguments in (_ARGUMENTS, {}):
        parser = StreamParser(None, notation, Calls((_TOOL,)), inside=False, one_call=False)
        text = layout.written(_NAME, arguments)
        reply = Reply.of([*parser.feed(text), *parser.finish()])
        if reply.text or [(call.name, call.value()) for call in reply.calls] != [(_NAME, arguments)]:
            return False
    return True
