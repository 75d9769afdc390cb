"""What the Anthropic dialect sends back: the events of a stream, and the same as one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gateway import sse
from gateway.answer import Answer, cache_report, cached_tokens, written_tokens
from gateway.errors import error_answer
from gateway.reply import CallArguments, CallEnd, CallStart, Part, ReasoningDelta, Reply, TextDelta, merged
from gateway.turn import Delta, Turn
from protocol.errors import ServeError

# Clients drop thinking without a signature when they send it back. Nobody checks ours.
_SIGNATURE = "prefixd"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(Answer):
    """`message` and its events. At most one block is open at a time, and none at all in one that says nothing."""

    keep_alive = sse.event("ping", {"type": "ping"})

    def __init__(self, request_id: str, model: str, *, is_silent: bool = False) -> None:
        self._request_id = request_id
        self._model = model
        self._is_silent = is_silent
        self._index = -1  # of the latest block
        self._open = ""  # its type; "" once it is closed

    def whole(self, deltas: Sequence[Delta], turn: Turn) -> dict[str, Any]:
        parts = [part for delta in deltas for part in delta.parts]
        blocks = [] if self._is_silent else _blocks(parts)
        return self._message(blocks, turn) | self._stop(turn) | {"prefixd": cache_report(turn)}

    def opening(self, turn: Turn) -> bytes:
        return _event("message_start", message=self._message([], turn)) + self.keep_alive

    def events(self, gained: Sequence[Delta]) -> bytes:
        if self._is_silent:
            return b""
        return b"".join(self._part(part) for delta in gained for part in delta.parts)

    def closing(self, turn: Turn) -> bytes:
        """The counts are final: those of the opening may have come before the lookup."""
        last = _event("message_delta", delta=self._stop(turn), usage=usage(turn), prefixd=cache_report(turn))
        return self._close() + last + _event("message_stop")

    def broken(self, error: ServeError) -> bytes:
        return sse.event("error", error_answer(error).anthropic_body(self._request_id))

    def _message(self, content: list[dict[str, Any]], turn: Turn) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(turn),
        }

    def _stop(self, turn: Turn) -> dict[str, Any]:
        """Why a turn that is done ended. A call before a stop sequence may be half a call."""
        _, reason = turn.reply(0)
        found = turn.stop_string(0)
        assert reason is not None
        told = _STOP_REASONS["length" if self._is_silent else reason]
        return {"stop_reason": told if found is None else "stop_sequence", "stop_sequence": found}

    def _part(self, part: Part) -> bytes:
        match part:
            case TextDelta():
                return self._begin({"type": "text", "text": ""}) + self._delta("text_delta", text=part.text)
            case ReasoningDelta():
                begun = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                return begun + self._delta("thinking_delta", thinking=part.text)
            case CallStart():
                return self._begin({"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
            case CallArguments():
                return self._delta("input_json_delta", partial_json=part.fragment)
            case CallEnd():
                return self._close()

    def _begin(self, block: dict[str, Any]) -> bytes:
        """Open a block, unless it goes on with the one that is open. Calls are closed by their own end."""
        if block["type"] == self._open:
            return b""
        closed = self._close()
        self._index += 1
        self._open = block["type"]
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **gained: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **gained})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta("signature_delta", signature=_SIGNATURE) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def usage(turn: Turn) -> dict[str, Any]:
    """What a turn used, as far as it is known. What was restored or kept does not count as input, but beside it."""
    cached, written = cached_tokens(turn), written_tokens(turn)
    return {
        "input_tokens": turn.prompt_tokens - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
        "service_tier": "standard",
    }


def _blocks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """A whole answer's blocks, as its stream would open them."""
    parts = merged(parts)
    calls = Reply.of(parts).calls
    blocks: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case TextDelta():
                blocks.append({"type": "text", "text": part.text})
            case ReasoningDelta():
                blocks.append({"type": "thinking", "thinking": part.text, "signature": _SIGNATURE})
            case CallStart():
                value = calls[part.index].value()
                value = value if isinstance(value, dict) else {}  # cut off: there is no object yet
                blocks.append({"type": "tool_use", "id": part.call_id, "name": part.name, "input": value})
            case _:
                pass
    return blocks


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, {"type": kind, **fields})
