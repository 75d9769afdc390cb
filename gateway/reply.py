"""What a generated answer consists of, whatever notation the model has for it: text, reasoning and calls of tools.

`Turn` gives every dialect the same parts, in order, in `Delta.parts`. A dialect writes them down as they come:

- `TextDelta` and `ReasoningDelta` may alternate and never hold half a character or a piece of a marker.
- A call is one `CallStart`, any number of `CallArguments`, and one `CallEnd`; calls do not overlap, other parts do not
  come between, and `index` counts them from 0. A started call is always ended, also where the answer is cut off.
- The fragments of a call join to the JSON text of an object, spaced as the model spaced it. Where the answer was cut
  off or the model broke off by itself, they join to the beginning of one: nothing is made up to complete it.
- `Delta.finish_reason` is "tool_calls" where an answer that ended by itself holds calls. In one that "length" cut off,
  or a stop string with "stop", the last call may be half a call.

What looks like a call but has no name that can be read, is text. The text of an answer is never lost, except blanks
beside calls and reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.body import mended, whole
from gateway.canonical import parse_arguments
from gateway.conversation import Message, ToolCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool. `call_id` is new, and the client will name it when it sends the result."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments; never empty."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Nothing more comes for this call."""

    index: int


Part = TextDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a whole. `arguments` is JSON text, or the beginning of it where the answer was cut off."""

    call_id: str
    name: str
    arguments: str

    def value(self) -> Any:
        """The arguments as an object, or their text where that is no JSON object."""
        if not self.arguments:
            return {}
        try:
            value = mended(json.loads(self.arguments, parse_int=whole))
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as a whole."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Reply:
        """What the parts of one choice amount to."""
        text: list[str] = []
        reasoning: list[str] = []
        started: list[CallStart] = []
        arguments: list[list[str]] = []
        for part in parts:
            match part:
                case TextDelta():
                    text.append(part.text)
                case ReasoningDelta():
                    reasoning.append(part.text)
                case CallStart():
                    started.append(part)
                    arguments.append([])
                case CallArguments():
                    arguments[part.index].append(part.fragment)
        calls = (Call(c.call_id, c.name, "".join(a)) for c, a in zip(started, arguments, strict=True))
        return cls("".join(text), "".join(reasoning), tuple(calls))

    def message(self) -> Message:
        """The message as which a client will send this answer back, in canonical form."""
        calls = tuple(
            ToolCall(call.call_id, call.name, parse_arguments(call.arguments, "arguments")) for call in self.calls
        )
        return Message("assistant", self.text.strip(), calls, reasoning=self.reasoning.strip() or None)


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same parts, with neighbours of one kind made one."""
    out: list[Part] = []
    for part in parts:
        match (out[-1] if out else None), part:
            case TextDelta(before), TextDelta(text):
                out[-1] = TextDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                out[-1] = ReasoningDelta(before + text)
            case CallArguments(index, before), CallArguments(_, fragment):
                out[-1] = CallArguments(index, before + fragment)
            case _:
                out.append(part)
    return tuple(out)


class ReplyParser(Protocol):
    """Takes the raw text of one choice apart. The joined parts do not depend on how the text was cut."""

    @property
    def done(self) -> bool:
        """Nothing that follows is wanted: one call was allowed, and it is complete."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after more text."""

    def finish(self) -> list[Part]:
        """What was held back, and the end of a call that is open, once no more text will come."""


class PlainParser:
    """An answer that is all text."""

    done = False

    def feed(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Part]:
        return []


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the answers to one request are read. `visible` are special tokens that are markers, so must be seen."""

    parser: Callable[[], ReplyParser] = PlainParser
    visible: frozenset[int] = frozenset()
