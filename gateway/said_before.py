"""Messages that were parsed lately, so that a history that is sent again is compared instead of parsed.

An agent sends its whole history each turn; comparing what JSON gave takes a tenth of the time of checking it all. The
messages are then the very objects of the turn before, by which other memories know them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.conversation import Message
from gateway.recent import Recent

_HELD_BYTES = 64 << 20
_TRIED = 8  # messages, from the last but one back, at which a history may go on from another
_KEYS = 4  # messages, from the last one back, by which one can be found: its end may be said differently
_TAIL = 32  # characters of a message by which histories are told apart before they are compared
_MESSAGE_BYTES = 1000  # of a message besides its text, about
_TEXTS = 4  # times the size of tools that they and the texts made of them may take

_Key = tuple[str, int, str]


class _Entry(NamedTuple):
    given: list[Any]
    messages: tuple[Message, ...]


class SaidBefore:
    """Safe to use from several threads. What is found was kept under the same `owner`: time must tell nothing."""

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self._recent: Recent[_Key, _Entry] = Recent(max_bytes)
        self._tools: Recent[tuple[str, str], tuple[dict[str, Any], ...]] = Recent(max_bytes)

    @property
    def held_bytes(self) -> int:
        """About what all that is kept takes."""
        return self._recent.held_bytes + self._tools.held_bytes

    def parsed(
        self, owner: str, size: int, given: list[Any], parse: Callable[[int], Message]
    ) -> tuple[Message, ...]:
        """The message of each item of `given`, which takes `size` bytes; `parse(at)` for those that are not known."""
        known = self._beginning(owner, given)
        messages = (*known, *map(parse, range(len(known), len(given))))
        self._keep(owner, size, given, messages, len(known))
        return messages

    def same_tools(self, owner: str, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """The very objects that were kept lately if they say the same as `tools`; else these, kept from now on."""
        if not tools:
            return tools
        text = json.dumps(tools)  # equal objects may be written in another order, or 1 as true
        kept = self._tools.get((owner, text))
        if kept is None:
            self._tools.keep(tools, [(owner, text)], _TEXTS * len(text))
        return kept or tools

    def _beginning(self, owner: str, given: list[Any]) -> tuple[Message, ...]:
        """Never the last: it may be one that the answer continues."""
        for count in range(len(given) - 1, max(len(given) - 1 - _TRIED, 0), -1):
            entry = self._recent.get((owner, count, _tail(given[count - 1])))
            if entry is not None and entry.given[:count] == given[:count]:
                return entry.messages[:count]
        return ()

    def _keep(self, owner: str, size: int, given: list[Any], messages: tuple[Message, ...], count: int) -> None:
        """`count` of them are known to be comparable, as far as which they are kept."""
        while count < len(given) - 1 and _is_comparable(given[count]):
            count += 1
        keys = [(owner, end, _tail(given[end - 1])) for end in range(max(count - _KEYS, 0) + 1, count + 1)]
        if keys:
            self._recent.keep(_Entry(given[:count], messages[:count]), keys, 2 * size + _MESSAGE_BYTES * count)


def _is_comparable(item: dict[str, Any]) -> bool:
    """Whether an equal item says the same. Not where arguments are an object: 1 equals true, and order is lost."""
    listed = item.get("tool_calls")
    calls = [call.get("function") for call in listed if isinstance(call, dict)] if isinstance(listed, list) else []
    functions = (*calls, item.get("function_call"))
    return not any(isinstance(each, dict) and isinstance(each.get("arguments"), dict) for each in functions)


def _tail(item: Any) -> str:
    """Some characters of an item as JSON gave it."""
    text = item.get("content") if isinstance(item, dict) else None
    return text[-_TAIL:] if isinstance(text, str) else ""
