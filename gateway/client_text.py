"""The strings in a conversation that a client wrote and a template may print, and control strings in them.

What is found in a message is kept with it: a history that comes again is not searched again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gateway.control_tokens import ControlTokens, private_characters, strings_in, unused_character
from gateway.conversation import Conversation, JsonObject, Message, ToolCall, text_of

_NONE: frozenset[str] = frozenset()
_USED = "private characters"


def texts(message: Message) -> Iterator[str]:
    """Every one of a message, some empty."""
    yield message.content
    if message.reasoning:
        yield message.reasoning
    if message.name:
        yield message.name
    if message.tool_call_id:
        yield message.tool_call_id
    for call in message.tool_calls:
        yield call.id
        yield call.name
        yield from strings_in(call.arguments)


def without_control(
    conversation: Conversation, control: ControlTokens, kept: Callable[[], frozenset[str]]
) -> tuple[Conversation, str]:
    """The conversation with every control string of its text broken by a character, and that ("": none is).

    Answers may hold those that are `kept`. What holds none stays the same object.
    """
    messages, tools = conversation.messages, conversation.tools
    if not (
        any([_occurs_in(control, message) for message in messages])
        or any([_occurs_in_tool(control, tool) for tool in tools])
        or any(map(control.occur_in, strings_in(conversation.variables)))
    ):
        return conversation, ""
    character = unused_character(_private(conversation))
    breaking = _Breaking(control, character, kept())
    return Conversation(
        tuple(breaking.message(each) if _occurs_in(control, each) else each for each in messages),
        tuple(breaking.value(each) if _occurs_in_tool(control, each) else each for each in tools),
        breaking.value(conversation.variables),
    ), character


def _occurs_in(control: ControlTokens, message: Message) -> bool:
    found = message.made.get(control)
    if found is None:
        found = message.made[control] = any(map(control.occur_in, texts(message)))
    return bool(found)


def _occurs_in_tool(control: ControlTokens, tool: dict[str, Any]) -> bool:
    def found() -> str:
        return next(filter(control.occur_in, strings_in(tool)), "")

    return bool(text_of(tool, control, found) if isinstance(tool, JsonObject) else found())


def _private(conversation: Conversation) -> Iterable[str]:
    """The private-use characters in all of it."""
    for message in conversation.messages:
        used = message.made.get(_USED)
        if used is None:
            used = message.made[_USED] = private_characters(texts(message))
        yield from used
    yield from private_characters(strings_in(conversation.tools))
    yield from private_characters(strings_in(conversation.variables))


class _Breaking:
    """Breaks control strings by one character."""

    def __init__(self, control: ControlTokens, character: str, kept: frozenset[str]) -> None:
        self._control, self._character, self._kept = control, character, kept
        self._key = (control, character, kept)

    def message(self, message: Message) -> Message:
        broken = message.made.get(self._key)
        if broken is None:
            broken = message.made[self._key] = self._message(message)
        assert isinstance(broken, Message)
        return broken

    def value(self, item: Any) -> Any:
        if isinstance(item, str):
            return self._text(item)
        if isinstance(item, dict):
            return {self._text(key): self.value(below) for key, below in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(self.value(below) for below in item)
        return item

    def _message(self, message: Message) -> Message:
        kept = self._kept if message.role == "assistant" else _NONE
        calls = (
            ToolCall(self._text(call.id), self._text(call.name), self.value(call.arguments))
            for call in message.tool_calls
        )
        return Message(
            message.role,
            self._text(message.content, kept),
            tuple(calls),
            self._optional(message.tool_call_id),
            self._optional(message.name),
            self._optional(message.reasoning, self._kept),
        )

    def _text(self, text: str, kept: frozenset[str] = _NONE) -> str:
        return self._control.broken(text, self._character, kept)

    def _optional(self, text: str | None, kept: frozenset[str] = _NONE) -> str | None:
        return None if text is None else self._text(text, kept)
