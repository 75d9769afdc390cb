"""The grammar of Anthropic's event streams, checked, and the message that a stream adds up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}


def parse_events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream without its comments; each has its name in both places."""
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":") or not block:
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def added_up(events: Iterable[dict[str, Any]], *, cut: bool = False) -> dict[str, Any]:
    """The message of a stream that ended well. `cut`: the arguments of its last call need not be whole."""
    message, error = _read(events, cut)
    assert error is None, error
    return message


def broken_off(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The error of a stream that did not, which must be its last word."""
    _, error = _read(events, cut=True)
    assert error is not None
    return error


def _read(events: Iterable[dict[str, Any]], cut: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert message["stop_reason"] is message["stop_sequence"] is None
    _check_usage(message["usage"])
    content: list[dict[str, Any]] = message["content"]
    written: dict[str, list[str]] | None = None  # of the open block
    ended = False
    for at, event in enumerate(events[1:], 1):
        last = at == len(events) - 1
        match event["type"]:
            case "content_block_start":
                assert written is None
                assert not ended
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
                written = {name: [] for name in _DELTAS[content[-1]["type"]].values()}
            case "content_block_delta":
                assert written is not None
                assert event["index"] == len(content) - 1
                field = _DELTAS[content[-1]["type"]][event["delta"]["type"]]
                assert not written.get("signature"), "nothing comes behind a signature"
                written[field].append(event["delta"][field])
            case "content_block_stop":
                assert written is not None
                assert event["index"] == len(content) - 1
                _close(content[-1], {name: "".join(pieces) for name, pieces in written.items()}, cut)
                written = None
            case "message_delta":
                assert written is None
                assert not ended
                ended = True
                assert event["delta"]["stop_reason"] in STOP_REASONS
                assert (event["delta"]["stop_sequence"] is None) is (
                    event["delta"]["stop_reason"] != "stop_sequence"
                )
                _check_usage(event["usage"])
                assert event["usage"]["output_tokens"] >= message["usage"]["output_tokens"]
                assert _input(event["usage"]) == _input(message["usage"])
                message |= {**event["delta"], "usage": event["usage"], "prefixd": event["prefixd"]}
            case "message_stop":
                assert ended
                assert last
            case "error":
                assert last
                assert not ended
                return message, event
            case other:
                raise AssertionError(f"no such event: {other}")
    assert events[-1]["type"] == "message_stop"
    return message, None


def _close(block: dict[str, Any], written: dict[str, str], cut: bool) -> None:
    if block["type"] == "tool_use":
        assert block["input"] == {}
        assert block["id"]
        assert block["name"]
        try:
            block["input"] = json.loads(written["partial_json"] or "{}")
        except ValueError:
            assert cut
        assert isinstance(block["input"], dict)
        return
    for name, text in written.items():
        assert block[name] == ""
        assert text
        block[name] = text


def _check_usage(usage: dict[str, Any]) -> None:
    for name in (
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    ):
        assert type(usage[name]) is int
        assert usage[name] >= 0


def _input(usage: dict[str, Any]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
