"""Learns a template's habits by rendering small conversations once, at load.

Templates disagree about things no standard settles: whether tool arguments are an object or text, whether an
assistant message that only calls tools has empty or no content, where the system text goes. Each probe has a
word in it that can be found again, so what became of it is seen rather than guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from gateway.boundaries import message_ends
from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Habits, Renderer, common_prefix
from gateway.template import ChatTemplate
from protocol.errors import SettingsError

_TOOL = {
    "type": "function",
    "function": {
        "name": "probefunction",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "p"}}},
    },
}
_CALL = ToolCall("call_0123456789abcdef", "probefunction", {"probekey": "probevalue"})
_SYSTEM, _USER = Message("system", "systemprobe"), Message("user", "firstprobe")
_ANSWER, _NEXT = Message("assistant", "answerprobe"), Message("user", "secondprobe")
_CALLING = Message("assistant", "", (_CALL,))
_RESULT = Message("tool", "resultprobe", tool_call_id=_CALL.id)

_PLAIN = (_USER, _ANSWER, _NEXT)
_CHATS = (_PLAIN, (_SYSTEM, *_PLAIN), (_USER,))
_TOOL_CHATS = (
    (_USER, _CALLING, _RESULT, _ANSWER, _NEXT),
    (_SYSTEM, _USER, _CALLING, _RESULT, _ANSWER, _NEXT),
    (_USER, _CALLING, _RESULT),
)


def learn(template: ChatTemplate) -> Renderer:
    """The renderer for a template. Raises `SettingsError` where even a plain chat cannot be rendered."""
    habits = _plain_habits(template)
    habits = _tool_habits(template, habits)
    conversations = [Conversation(chat) for chat in _CHATS]
    conversations += [Conversation(chat, (_TOOL,)) for chat in (*_TOOL_CHATS, _PLAIN)]
    rendered = [c for c in conversations if _text(template, habits, c) is not None]
    habits = replace(
        habits,
        answer_in_loop=any(_answers_in_loop(template, habits, c) for c in rendered),
        misplaced=frozenset(role for c in rendered for role in _misplaced(template, habits, c)),
        end_of_turn=_end_of_turn(template, habits),
    )
    return Renderer(template, habits)


def probe_texts(renderer: Renderer) -> Iterator[str]:
    """Renders of all probes that the template takes, with and without the generation prompt."""
    for chat, tools in product((*_CHATS, *_TOOL_CHATS), ((), (_TOOL,))):
        for reply in (True, False):
            text = _text(renderer.template, renderer.habits, Conversation(chat, tools), reply)
            if text is not None:
                yield text


def _text(template: ChatTemplate, habits: Habits, conversation: Conversation, reply: bool = True) -> str | None:
    try:
        return Renderer(template, habits).run(conversation, reply).text
    except Exception:  # whatever a foreign template's code raises means: not like this
        return None


def _plain_habits(template: ChatTemplate) -> Habits:
    for habits in (Habits(), Habits(no_tools=())):
        text = _text(template, habits, Conversation(_PLAIN))
        if text is not None and _NEXT.content in text:
            return habits
    for habits in (Habits(), Habits(no_tools=())):
        # The template may demand tools; then it serves requests that bring some.
        if _NEXT.content in (_text(template, habits, Conversation(_PLAIN, (_TOOL,))) or ""):
            return habits
    try:
        template.render(Renderer(template, Habits()).messages(Conversation(_PLAIN)), None, reply=True)
    except Exception as error:
        raise SettingsError(f"chat_template: cannot render a plain conversation: {error}") from error
    raise SettingsError("chat_template: a user message does not appear in its text")


def _tool_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """The first way of writing tool calls, results and tools that comes out right; as given where none does."""
    text = _text(template, habits, Conversation(_PLAIN, (_TOOL,)))
    if text is not None and _CALL.name not in text:
        shown = replace(habits, tools_as_text=True)
        if _CALL.name in (_text(template, shown, Conversation(_PLAIN, (_TOOL,))) or ""):
            habits = shown
    forms = ((False, False), (True, False), (True, True))
    for form, ordinal, raw, empty in product(forms, (False, True), (False, True), ("", None)):
        tried = replace(
            habits,
            calls_as_text=form[0],
            results_as_user=form[1],
            ordinal_ids=ordinal,
            arguments_as_text=raw,
            empty_content=empty,
        )
        text = _text(template, tried, Conversation(_TOOL_CHATS[0], (_TOOL,)))
        if text is not None and _call_came_out(text):
            return tried
    return habits


def _call_came_out(text: str) -> bool:
    tail = text[text.find(_USER.content) :]
    spoilt = any(sign in tail for sign in ('\\"probekey', "'probekey'", "None", "\\\\"))
    return not spoilt and "probevalue" in tail and "probefunction" in tail and _RESULT.content in tail


def _answers_in_loop(template: ChatTemplate, habits: Habits, conversation: Conversation) -> bool:
    renderer = Renderer(template, habits)
    asking, plain = renderer.run(conversation, True), renderer.run(conversation, False)
    end = message_ends(asking.spans, len(conversation.messages))[-1]
    return end is not None and end > common_prefix(asking.text, plain.text)


def _misplaced(template: ChatTemplate, habits: Habits, conversation: Conversation) -> Iterator[str]:
    """Roles of messages whose text is behind a cut that counts them, or before one that does not."""
    renderer = Renderer(template, replace(habits, misplaced=frozenset()))
    prompt = renderer.render(conversation)
    for index, message in enumerate(conversation.messages):
        at = prompt.text.find(message.content) if message.content else -1
        if at < 0:
            continue
        if any((at < cut.end) != (index < cut.messages) for cut in prompt.cuts):
            yield message.role


def _end_of_turn(template: ChatTemplate, habits: Habits) -> str:
    text = _text(template, habits, Conversation((_USER, _ANSWER)), reply=False) or ""
    _, found, after = text.partition(_ANSWER.content)
    return after if found else ""
