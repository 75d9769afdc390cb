"""What every stream of a Responses API must keep to, whatever it says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

_MODELS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}
_FINAL = ("response.completed", "response.incomplete", "response.failed")
_WITH_RESPONSE = ("response.created", "response.in_progress", *_FINAL)

Event = dict[str, Any]


def read_events(lines: Iterable[str]) -> tuple[list[Event], list[str]]:
    """Events and comments of a stream; each event's name is its type."""
    events: list[Event] = []
    comments: list[str] = []
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            assert name == events[-1]["type"]
            name = None
        elif line.startswith(":"):
            comments.append(line[1:].strip())
        else:
            assert not line, f"no such line in this stream: {line}"
    return events, comments


def check_stream(events: list[Event]) -> dict[str, Any]:
    """The grammar of a stream that has ended. Returns the response it ended with."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        _MODELS[event["type"]].model_validate(event)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [kind for kind in kinds if kind in _FINAL] == kinds[-1:]
    assert all("output" in event["response"] for event in events if event["type"] in _WITH_RESPONSE)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    final: dict[str, Any] = events[-1]["response"]
    assert kinds[-1] == f"response.{final['status']}"
    broken = final["status"] == "failed"
    middle = events[2:-1]
    if broken:
        assert middle[-1]["type"] == "error"
        assert final["error"]["message"] == middle[-1]["message"]
        assert final["usage"] is None
        middle = middle[:-1]
    items = _Items(middle)
    assert items.open is None or broken, "an item was never done"
    assert [item["id"] for item in final["output"]] == [item["id"] for item in items.begun]
    for done, item in zip(items.done, final["output"], strict=False):
        assert done == item
    check_response(final)
    return final


def check_response(response: dict[str, Any]) -> Response:
    """A response that has ended, as the official client's model has it, and consistent in itself."""
    model = Response.model_validate(response)
    status, statuses = response["status"], [item["status"] for item in response["output"]]
    assert response["object"] == "response"
    assert (response["error"] is None) == (status != "failed")
    cut_off = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert response["incomplete_details"] == cut_off
    if status != "failed":
        usage = response["usage"]
        assert type(usage["input_tokens_details"]["cached_tokens"]) is int
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
        assert response["output"], "there is nothing to look into"
        assert set(statuses[:-1]) <= {"completed"}
        may_be_half = status == "incomplete" or response["output"][-1]["type"].endswith(
            "_call"
        )  # by a stop string
        assert may_be_half or statuses[-1] == "completed"
    assert len({item["id"] for item in response["output"]}) == len(statuses)
    return model


class _Items:
    """Follows items and parts, which begin and end one after the other."""

    def __init__(self, events: list[Event]) -> None:
        self.begun: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self._part: str | None = None  # its text so far
        self._told: str | None = None  # the whole text of what has just been finished
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert self.open is None, "two items at once"
            assert event["output_index"] == len(self.begun)
            self.open = event["item"]
            assert self.open.get("status") == "in_progress"
            assert not self.open.get("content")
            assert not self.open.get("summary")
            self.begun.append(self.open)
            self._part = "" if self.open["type"].endswith("call") else None
            return
        assert self.open is not None, f"{kind} outside of an item"
        assert event["output_index"] == len(self.begun) - 1
        if kind == "output_item.done":
            self._end_item(event["item"])
            return
        assert event["item_id"] == self.open["id"]
        assert event.get("content_index", 0) == event.get("summary_index", 0) == 0
        if kind.endswith("part.added"):
            assert self._part is None
            assert event["part"]["text"] == ""
            self._part = ""
        elif kind.endswith("part.done"):
            assert event["part"]["text"] == self._told
        elif kind.endswith(".delta"):
            assert self._part is not None, "a piece outside of a part"
            self._part += event["delta"]
        else:
            assert kind.endswith(".done")
            self._told = next(event[name] for name in ("text", "arguments", "input") if name in event)
            assert self._told == self._part, "the pieces do not join to the whole"
            self._part = None

    def _end_item(self, item: dict[str, Any]) -> None:
        assert self.open is not None
        assert self._part is None, "a part was never done"
        assert {name: item[name] for name in ("id", "type")} == {name: self.open[name] for name in ("id", "type")}
        assert text_of(item) == self._told
        self.done.append(item)
        self.open = None


def text_of(item: dict[str, Any]) -> str:
    """What an output item says, whatever it is."""
    parts = item.get("content") or item.get("summary")
    if parts is not None:
        return "".join(part["text"] for part in parts)
    return item.get("arguments", item.get("input", ""))
