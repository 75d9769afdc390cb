"""The dialect-neutral form of a conversation, with everything removed that clients vary without meaning it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


class JsonObject(dict[str, Any]):
    """An object that a client sent, never changed from then on; it keeps the texts that `text_of` made of it.

    It has no names but a dict's: templates would take them for fields.
    """

    __slots__ = ("_texts",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._texts: dict[Hashable, str] = {}


def text_of(value: JsonObject, layout: Hashable, write: Callable[[], str]) -> str:
    """What `write` makes of `value`, made once for each layout."""
    text = value._texts.get(layout)
    if text is None:
        text = value._texts[layout] = write()
    return text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made. `arguments` is the parsed JSON, or the text itself where it was none."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `name` and `tool_call_id` belong to role `tool`, `reasoning` and `tool_calls` to `assistant`.

    `mark_seconds` is a client's wish to have all up to its end cached so long; it is no part of what is said. `made`
    holds what was made of this very message before, by whoever made it: an agent's history comes again each turn.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    mark_seconds: int = field(default=0, compare=False)
    made: dict[Hashable, Any] = field(init=False, default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders. `variables` go to the template as they are.

    `loaded` are further tools that may be called: some message describes them, so the template is not given them.
    `allowed` are the names of the only ones that may be called this time, None if all may; the prompt has all of them.
    `session` is the client's name for it, `head_seconds` a mark on its tools: hints, as `Message.mark_seconds` is.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    loaded: tuple[dict[str, Any], ...] = ()
    allowed: frozenset[str] | None = field(default=None, compare=False)
    session: str = field(default="", compare=False)
    head_seconds: int = field(default=0, compare=False)

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Every tool that the answer may call; of two of one name the one that came later is meant."""
        known = {tool["function"]["name"]: tool for tool in (*self.tools, *self.loaded)}
        allowed = self.allowed
        return tuple(tool for name, tool in known.items() if allowed is None or name in allowed)

    @property
    def continues(self) -> bool:
        """The last message is the beginning of the answer, to be carried on."""
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls
