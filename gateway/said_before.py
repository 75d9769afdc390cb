"""Messages that were parsed lately, so that a history that is sent again is compared instead of parsed.

An agent sends its whole history each turn; comparing what JSON gave takes a tenth of the time of checking it all. The
messages are then the very objects of the turn before, by which other memories know them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import orjson

from gateway.conversation import Message
from gateway.recent import Recent

_HELD_BYTES = 64 << 20
_TRIED = 8  # messages, from the last but one back, at which a history may go on from another
_KEYS = 4  # messages, from the last one back, by which one can be found: its end may be said differently
_TAIL = 32  # characters of a message by which histories are told apart before they are compared
_MESSAGE_BYTES = 2000  # of a message, and what is made of it, besides its text, about
_TEXTS = 4  # times the size of tools that they and the texts made of them may take

_Key = tuple[str, int, str]
_Said = TypeVar("_Said")


class _Entry(NamedTuple, Generic[_Said]):
    """`loose`: places of items that say the same as another only if they are the same object."""

    given: list[Any]
    messages: tuple[_Said, ...]
    loose: tuple[int, ...]


class SaidBefore(Generic[_Said]):
    """What each item of a list of messages says. Safe to use from several threads.

    What is found was kept under the same `owner`: time must tell nothing.
    """

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self._recent: Recent[_Key, _Entry[_Said]] = Recent(max_bytes)
        self._tools: Recent[tuple[str, bytes], tuple[dict[str, Any], ...]] = Recent(max_bytes)
        self._heads: Recent[tuple[str, str], Message] = Recent(max_bytes)

    @property
    def held_bytes(self) -> int:
        """About what all that is kept takes."""
        return self._recent.held_bytes + self._tools.held_bytes + self._heads.held_bytes

    def parsed(
        self,
        owner: str,
        size: int,
        given: list[Any],
        parse: Callable[[int], _Said],
        stands_alone: Callable[[Any], bool] = lambda _: True,
    ) -> tuple[_Said, ...]:
        """What each item of `given` says, which takes `size` bytes; `parse(at)` for those that are not known.

        An item that does not stand alone may say something else elsewhere: it and those behind it are parsed again.
        """
        known, loose = self._beginning(owner, given)
        messages = (*known, *map(parse, range(len(known), len(given))))
        count = len(known)
        while count < len(given) - 1 and stands_alone(given[count]):
            if not _is_comparable(given[count]):
                loose = (*loose, count)
            count += 1
        keys = [(owner, end, _tail(given[end - 1])) for end in range(max(count - _KEYS, 0) + 1, count + 1)]
        if keys:
            entry = _Entry(given[:count], messages[:count], loose)
            self._recent.keep(entry, keys, 2 * size + _MESSAGE_BYTES * count)
        return messages

    def same_tools(self, owner: str, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """The very objects that were kept lately if they say the same as `tools`; else these, kept from now on."""
        if not tools:
            return tools
        text = _text(tools)  # equal objects may be written in another order, or 1 as true
        kept = self._tools.get((owner, text))
        if kept is None:
            self._tools.keep(tools, [(owner, text)], _TEXTS * len(text))
        return kept or tools

    def same_head(self, owner: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages; the first one, if it is the system's, is the object that was kept lately if that is equal."""
        if messages[0].role != "system":
            return messages
        key = owner, messages[0].content
        kept = self._heads.get(key)
        if kept is None:
            self._heads.keep(messages[0], [key], 2 * len(messages[0].content) + _MESSAGE_BYTES)
        return messages if kept is None or kept is messages[0] else (kept, *messages[1:])

    def _beginning(self, owner: str, given: list[Any]) -> tuple[tuple[_Said, ...], tuple[int, ...]]:
        """Never the last: it may be one that the answer continues."""
        for count in range(len(given) - 1, max(len(given) - 1 - _TRIED, 0), -1):
            entry = self._recent.get((owner, count, _tail(given[count - 1])))
            if entry is None or entry.given[:count] != given[:count]:
                continue
            loose = tuple(at for at in entry.loose if at < count)
            if all(entry.given[at] is given[at] for at in loose):
                return entry.messages[:count], loose
        return (), ()


def _is_comparable(item: dict[str, Any]) -> bool:
    """Whether an equal item says the same. Not where arguments are an object: 1 equals true, and order is lost."""
    listed, content = item.get("tool_calls"), item.get("content")
    calls = [call.get("function") for call in listed if isinstance(call, dict)] if isinstance(listed, list) else []
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    functions = (*calls, item.get("function_call"))
    return not any(
        isinstance(each, dict) and isinstance(each.get("arguments"), dict) for each in functions
    ) and not any(isinstance(block.get("input"), dict) for block in blocks)


def _text(tools: tuple[dict[str, Any], ...]) -> bytes:
    try:
        return orjson.dumps(tools)
    except orjson.JSONEncodeError:  # whole numbers of more than 64 bits
        return json.dumps(tools).encode()


def _tail(item: Any) -> str:
    """Some characters of an item as JSON gave it."""
    text = item.get("content") if isinstance(item, dict) else None
    return text[-_TAIL:] if isinstance(text, str) else ""
