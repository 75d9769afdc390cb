"""A response object, and the events that build it. A whole answer is what its stream would have ended with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from gateway import sse
from gateway.answer import Answer, cache_report, cached_tokens, written_tokens
from gateway.detokenizer import TokenBytes
from gateway.errors import error_answer
from gateway.openai_answers import scored_token
from gateway.reply import CallArguments, CallEnd, CallStart, Part, ReasoningDelta, TextDelta
from gateway.responses_items import CustomCallItem, Event, FunctionCallItem, Item, MessageItem, ReasoningItem
from gateway.responses_params import ResponsesParams
from gateway.responses_tools import Offered, Tools
from gateway.turn import Delta, ScoredToken, Turn
from protocol.errors import CapacityError, RequestError, ServeError


class ResponsesAnswer(Answer):
    """The answer to `POST /v1/responses`: one choice of one prompt."""

    def __init__(
        self, request_id: str, model: str, params: ResponsesParams, tools: Tools, tokens: TokenBytes
    ) -> None:
        self._id = request_id
        self._params, self._tools, self._tokens = params, tools, tokens
        self._head = _head(f"resp_{request_id}", model, params, tools)
        self._items: list[Item] = []
        self._open: Item | None = None
        self._scored: list[ScoredToken] = []  # of text that has not gone out
        self._finish_reason: str | None = None
        self._sent = 0  # events

    def whole(self, deltas: Sequence[Delta], turn: Turn) -> dict[str, Any]:
        for delta in deltas:
            for _ in self._gained(delta):
                pass
        return self._final(turn)

    def opening(self, turn: Turn) -> bytes:
        return self._written({"type": f"response.{kind}", "response": self._head} for kind in _OPENING)

    def events(self, gained: Sequence[Delta]) -> bytes:
        return self._written(event for delta in gained for event in self._gained(delta))

    def closing(self, turn: Turn) -> bytes:
        final = self._final(turn)
        return self._written([{"type": f"response.{final['status']}", "response": final}])

    def broken(self, error: ServeError) -> bytes:
        told = error_answer(error).body["error"]
        event = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
        why = {"code": _failure_code(error), "message": told["message"]}
        for _ in self._end_item("incomplete"):  # an item that was never done has no events to say so
            pass
        failed = self._head | {"status": "failed", "error": why, "output": self._output()}
        return self._written([event, {"type": "response.failed", "response": failed}])

    def _written(self, events: Iterator[Event] | Sequence[Event]) -> bytes:
        written: list[bytes] = []
        for event in events:
            written.append(sse.event(event["type"], event | {"sequence_number": self._sent}))
            self._sent += 1
        return b"".join(written)

    def _gained(self, delta: Delta) -> Iterator[Event]:
        self._scored += delta.scored
        self._finish_reason = delta.finish_reason
        parts = delta.parts
        if delta.finish_reason in ("length", "stop") and parts and isinstance(parts[-1], CallEnd):
            parts = parts[:-1]  # a call that was cut off ends with the answer, and not as a complete one
        for part in parts:
            yield from self._part(part)
        if delta.finish_reason is not None:
            yield from self._end_answer()

    def _part(self, part: Part) -> Iterator[Event]:
        match part:
            case TextDelta():
                yield from self._text(part.text)
            case ReasoningDelta():
                self._scored = []
                if not isinstance(self._open, ReasoningItem):
                    params = self._params
                    sealed, as_summary = params.seals_reasoning, params.summary is not None
                    yield from self._begin(
                        ReasoningItem(self._id, len(self._items), as_summary=as_summary, sealed=sealed)
                    )
                assert self._open is not None
                yield from self._open.add(part.text)
            case CallStart():
                self._scored = []
                tool = self._tools.offered.get(part.name) or Offered("function", part.name)
                make = CustomCallItem if tool.kind == "custom" else FunctionCallItem
                yield from self._begin(make(self._id, len(self._items), part.call_id, tool))
            case CallArguments():
                assert self._open is not None, "arguments came outside of a call"
                yield from self._open.add(part.fragment)
            case CallEnd():
                yield from self._end_item("completed")

    def _text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, MessageItem):
            yield from self._begin(MessageItem(self._id, len(self._items)))
        assert isinstance(self._open, MessageItem)
        scored = [scored_token(self._tokens, token) for token in self._scored]
        self._scored = []
        yield from self._open.add(text, scored)

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._open = item
        self._items.append(item)
        yield from item.begin()

    def _end_item(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
        self._open = None

    def _end_answer(self) -> Iterator[Event]:
        """There is always an item, as clients look into the first one. Only the last one can have been cut off."""
        if not self._items or (self._scored and isinstance(self._open, MessageItem)):
            yield from self._text("")
        half = self._finish_reason == "length" or isinstance(self._open, FunctionCallItem | CustomCallItem)
        yield from self._end_item("incomplete" if half else "completed")

    def _output(self) -> list[dict[str, Any]]:
        return [item.as_object() for item in self._items]

    def _final(self, turn: Turn) -> dict[str, Any]:
        cut_off = self._finish_reason == "length"
        return self._head | {
            "status": "incomplete" if cut_off else "completed",
            "completed_at": None if cut_off else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._output(),
            "usage": usage(turn),
            "prefixd": cache_report(turn),
        }


_OPENING = ("created", "in_progress")


def usage(turn: Turn) -> dict[str, Any]:
    """What a completed turn used. Cached tokens are part of the input's."""
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens(turn), "cache_write_tokens": written_tokens(turn)},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


def _failure_code(error: ServeError) -> str:
    """One of the few that the API has for a failed response, and one more that clients know."""
    match error:
        case RequestError(code="context_length_exceeded"):
            return "context_length_exceeded"
        case RequestError():
            return "invalid_prompt"
        case CapacityError():
            return "rate_limit_exceeded"
        case _:
            return "server_error"


def _head(response_id: str, model: str, params: ResponsesParams, tools: Tools) -> dict[str, Any]:
    """A response without any output, with the request's fields as they are understood here."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": params.instructions,
        "max_output_tokens": params.max_output_tokens,
        "max_tool_calls": None,
        "metadata": params.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": params.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": params.prompt_cache_key,
        "reasoning": {"effort": params.effort, "summary": params.summary},
        "safety_identifier": params.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "text": {"format": _text_format(params)},
        "tool_choice": params.tool_choice or "auto",
        "tools": list(tools.echoed),
        "top_logprobs": params.top_logprobs or 0,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": params.user,
    }


def _text_format(params: ResponsesParams) -> dict[str, Any]:
    form = params.text.format if params.text else None
    return form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
