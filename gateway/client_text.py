"""The strings in a conversation that a client wrote and a template may print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gateway.control_tokens import strings_in
from gateway.conversation import Conversation, Message, ToolCall


def texts(conversation: Conversation) -> Iterator[str]:
    """Every one of them, some empty."""
    for message in conversation.messages:
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
    yield from strings_in(conversation.tools)
    yield from strings_in(conversation.variables)


def rewritten(conversation: Conversation, change: Callable[[str, bool], str]) -> Conversation:
    """The conversation with every string changed; `change` is told whether it is the text of an answer."""

    def value(item: Any) -> Any:
        if isinstance(item, str):
            return change(item, False)
        if isinstance(item, dict):
            return {change(key, False): value(below) for key, below in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(value(below) for below in item)
        return item

    def optional(text: str | None, answer: bool = False) -> str | None:
        return None if text is None else change(text, answer)

    messages = [
        Message(
            message.role,
            change(message.content, message.role == "assistant"),
            tuple(
                ToolCall(change(call.id, False), change(call.name, False), value(call.arguments))
                for call in message.tool_calls
            ),
            optional(message.tool_call_id),
            optional(message.name),
            optional(message.reasoning, True),
        )
        for message in conversation.messages
    ]
    return Conversation(tuple(messages), value(conversation.tools), value(conversation.variables))
