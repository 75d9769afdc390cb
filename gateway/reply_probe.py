"""Finds out how a template's model writes calls and reasoning, by reading what the template makes of them."""

from __future__ import annotations

from typing import NamedTuple

from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Renderer
from gateway.reply import CallEnd, Reply, TextDelta
from gateway.reply_calls import Calls, Notation
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_parser import StreamParser, Thinking

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_function",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "w"},
                "number": {"type": "integer", "description": "n"},
            },
        },
    },
}
_USER, _WHY = Message("user", "userprobe"), "whyprobe"
_CALL = ToolCall("call_0123456789abcdef", "probe_function", {"word": "wordprobe", "number": 7})
_OTHER = ToolCall("call_fedcba9876543210", "probe_function", {"word": "otherprobe", "number": 8})
_RESULT = "resultprobe"


class Formats(NamedTuple):
    """Names of what was found, "none" where nothing was."""

    calls: str
    reasoning: str


def find_formats(renderer: Renderer) -> Formats:
    """The notations of the model that a template belongs to."""
    reasoning = _find_thinking(renderer)
    thinking = THINKINGS.get(reasoning)
    found = (name for name, notation in NOTATIONS.items() if _reads(renderer, notation, thinking))
    return Formats(next(found, "none"), reasoning)


def _find_thinking(renderer: Renderer) -> str:
    thought = (
        (_USER, Message("assistant", "", (_CALL,), reasoning=_WHY), _result(_CALL)),
        (_USER, Message("assistant", "saidprobe", reasoning=_WHY)),
    )
    texts = [_text(renderer, messages, False) for messages in thought]
    asked = _text(renderer, (_USER,), True)
    looked_for = renderer.template.looked_for
    for name, thinking in THINKINGS.items():
        if any(_frames(thinking, text) for text in texts):
            return name
        if thinking.open in asked or any(thinking.close in text for text in looked_for):
            return name
    source = renderer.template.source  # it may tell the model in words
    named = (name for name, t in THINKINGS.items() if t.open in source and t.close in source)
    return next(named, "none")


def _frames(thinking: Thinking, text: str) -> bool:
    before, found, after = text.partition(_WHY)
    return bool(found) and before.rstrip().endswith(thinking.open.rstrip()) and thinking.close in after


def _reads(renderer: Renderer, notation: Notation, thinking: Thinking | None) -> bool:
    """Whether a notation reads two calls, or the one that the template takes, and leaves no markup over as text."""
    for calls in ((_CALL, _OTHER), (_CALL,)):
        if len(calls) > 1 and (renderer.habits.single_calls or renderer.habits.calls_in_turn):
            continue
        asked = _text(renderer, (_USER,), True)
        whole = _text(renderer, (_USER, Message("assistant", "", calls), *map(_result, calls)), True)
        answer = whole[whole.rfind(_USER.content) + len(_USER.content) :]
        exact = bool(asked) and whole.startswith(asked)
        if exact:
            answer = whole[len(asked) :]
        opening = asked[asked.rfind(_USER.content) :] if exact else ""
        inside = thinking is not None and thinking.opened_by(opening)
        end = renderer.habits.end_before_calls
        parser = StreamParser(thinking, notation, Calls((_TOOL,)), inside=inside, one_call=False, end=end)
        parts = [*parser.feed(answer.partition(_RESULT)[0]), *parser.finish()]
        made = [(call.name, call.value()) for call in Reply.of(parts).calls]
        ends = [at for at, part in enumerate(parts) if isinstance(part, CallEnd)]
        leaked = exact and any(isinstance(part, TextDelta) for part in parts[: ends[-1] if ends else 0])
        if made == [(call.name, call.arguments) for call in calls] and not leaked:
            return True
    return False


def _result(call: ToolCall) -> Message:
    return Message("tool", _RESULT, tool_call_id=call.id)


def _text(renderer: Renderer, messages: tuple[Message, ...], reply: bool) -> str:
    """What the template writes; "" where it refuses."""
    try:
        return renderer.run(Conversation(messages, (_TOOL,)), reply).text
    except Exception:  # whatever a foreign template's code raises means: not like this
        return ""
