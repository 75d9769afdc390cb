"""Output items of a response while they are written: each knows its events and what it has become so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from gateway.custom_tools import custom_input
from gateway.reply import Call
from gateway.responses_input import seal
from gateway.responses_tools import Offered

Event = dict[str, Any]


class Item(ABC):
    """One output item. `begin`, then any number of `add`, then `end`; `as_object` is right at all times."""

    id_prefix: ClassVar[str]

    def __init__(self, response_id: str, index: int) -> None:
        self.index = index
        self.id = f"{self.id_prefix}{response_id}_{index}"
        self._said: list[str] = []
        self._status = "in_progress"

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.as_object()}

    @abstractmethod
    def add(self, text: str) -> Iterator[Event]:
        """More of what the item says."""

    def end(self, status: str) -> Iterator[Event]:
        """`status` is "completed" or, of an item that was cut off, "incomplete"."""
        self._status = status
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.as_object()}

    @abstractmethod
    def as_object(self) -> dict[str, Any]:
        """The item as the API has it."""

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}

    @property
    def _text(self) -> str:
        return "".join(self._said)


class MessageItem(Item):
    """What the model says to the user: one part of text."""

    id_prefix = "msg_"

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index)
        self._logprobs: list[dict[str, Any]] = []
        self._begun = False

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        self._begun = True
        yield self._event("content_part.added", content_index=0, part=self._part())

    def add(self, text: str, logprobs: Iterable[dict[str, Any]] = ()) -> Iterator[Event]:
        scored = list(logprobs)
        self._said.append(text)
        self._logprobs += scored
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=scored)

    def end(self, status: str) -> Iterator[Event]:
        text, scored = self._text, self._logprobs
        yield self._event("output_text.done", content_index=0, text=text, logprobs=scored)
        yield self._event("content_part.done", content_index=0, part=self._part())
        yield from super().end(status)

    def as_object(self) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "status": self._status,
            "role": "assistant",
            "content": [self._part()] if self._begun else [],
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class ReasoningItem(Item):
    """What the model thinks first. A client that asked for a summary gets the same text as that."""

    id_prefix = "rs_"

    def __init__(self, response_id: str, index: int, *, as_summary: bool, sealed: bool) -> None:
        super().__init__(response_id, index)
        self._as_summary, self._sealed = as_summary, sealed
        self._begun = False
        self._at = {"summary_index" if as_summary else "content_index": 0}
        self._kind = "reasoning_summary_text" if as_summary else "reasoning_text"
        self._part_kind = "reasoning_summary_part" if as_summary else "content_part"

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        self._begun = True
        yield self._event(f"{self._part_kind}.added", **self._at, part=self._part())

    def add(self, text: str) -> Iterator[Event]:
        self._said.append(text)
        yield self._event(f"{self._kind}.delta", **self._at, delta=text)

    def end(self, status: str) -> Iterator[Event]:
        yield self._event(f"{self._kind}.done", **self._at, text=self._text)
        yield self._event(f"{self._part_kind}.done", **self._at, part=self._part())
        yield from super().end(status)

    def as_object(self) -> dict[str, Any]:
        parts = [self._part()] if self._begun else []
        item: dict[str, Any] = {
            "type": "reasoning",
            "id": self.id,
            "status": self._status,
            "summary": parts if self._as_summary else [],
        }
        if not self._as_summary:
            item["content"] = parts
        if self._sealed:
            item["encrypted_content"] = seal(self._text)
        return item

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": self._text}


class _CallItem(Item):
    """A call of one of the client's tools. Its text are the arguments as the model writes them."""

    def __init__(self, response_id: str, index: int, call_id: str, tool: Offered) -> None:
        super().__init__(response_id, index)
        self._call_id, self._tool = call_id, tool

    def _fields(self, kind: str, said: dict[str, str]) -> dict[str, Any]:
        fields = {"type": kind, "id": self.id, "call_id": self._call_id, "name": self._tool.name}
        if self._tool.namespace is not None:
            fields["namespace"] = self._tool.namespace
        return {**fields, **said, "status": self._status}


class FunctionCallItem(_CallItem):
    """Streams the arguments."""

    id_prefix = "fc_"

    def add(self, text: str) -> Iterator[Event]:
        self._said.append(text)
        yield self._event("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Iterator[Event]:
        yield self._event("function_call_arguments.done", name=self._tool.name, arguments=self._text)
        yield from super().end(status)

    def as_object(self) -> dict[str, Any]:
        return self._fields("function_call", {"arguments": self._text})


class CustomCallItem(_CallItem):
    """The input is known only once the arguments that hold it are complete."""

    id_prefix = "ctc_"

    def __init__(self, response_id: str, index: int, call_id: str, tool: Offered) -> None:
        super().__init__(response_id, index, call_id, tool)
        self._input = ""

    def add(self, text: str) -> Iterator[Event]:
        self._said.append(text)
        return iter(())

    def end(self, status: str) -> Iterator[Event]:
        self._input = custom_input(Call(self._call_id, self._tool.name, self._text).value(), self._text)
        yield self._event("custom_tool_call_input.delta", delta=self._input)
        yield self._event("custom_tool_call_input.done", input=self._input)
        yield from super().end(status)

    def as_object(self) -> dict[str, Any]:
        return self._fields("custom_tool_call", {"input": self._input})
