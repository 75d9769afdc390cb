"""Only what is surely made in a moment is made on the event loop."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.body_memory import BodyMemory
from gateway.quick import is_quick

HISTORY = [{"role": "user", "content": f"{number}: " + "word " * 100} for number in range(50)]
ASKED = {"role": "user", "content": "And then?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.fixture
def bodies() -> BodyMemory:
    """They know a history of 25 kB."""
    bodies = BodyMemory()
    bodies.parse("me", body(HISTORY))
    return bodies


def body(messages: list[Any], **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize(
    "sent",
    [
        body([*HISTORY, ASKED]),
        body([*HISTORY, ASKED], tools=[TOOL], tool_choice="auto", stream=True),
        body([ASKED]),
        orjson.dumps({"input": "And then?"}),
        b"no JSON",
    ],
    ids=["a turn", "with tools", "a first turn", "text", "no JSON"],
)
def test_little_that_is_new_is_quick(bodies: BodyMemory, sent: bytes):
    assert is_quick(bodies, "me", sent)


@pytest.mark.parametrize(
    "sent",
    [
        body(HISTORY[::-1]),
        body([*HISTORY, {"role": "user", "content": "word " * 1000}]),
        body([ASKED], response_format={"type": "json_object"}),
        body([*HISTORY, ASKED], response_format={"type": "json_object"}),
        body([ASKED], chat_template_kwargs={"n": 9}),
        body([ASKED], tools=[TOOL], tool_choice="required"),
        body([ASKED], tools=[STRICT]),
        orjson.dumps({"input": "And then?", "text": {"format": {"type": "json_object"}}}),
        orjson.dumps({"input": "word " * 1000}),
    ],
    ids=["unknown", "long", "form", "form of a turn", "variables", "forced", "strict", "text format", "long text"],
)
def test_what_may_take_long_is_not(bodies: BodyMemory, sent: bytes):
    assert not is_quick(bodies, "me", sent)


def test_what_is_known_of_others_does_not_count(bodies: BodyMemory):
    assert not is_quick(bodies, "you", body([*HISTORY, ASKED]))


@pytest.mark.parametrize("messages", [[ASKED] * 600, [*HISTORY, {"role": "user", "content": "word " * 60_000}]])
def test_histories_that_are_long_are_not_though_they_are_known(bodies: BodyMemory, messages: list[Any]):
    bodies.parse("me", body(messages))
    assert not is_quick(bodies, "me", body([*messages, ASKED]))


def test_what_was_looked_at_is_not_parsed_again():
    bodies, sent = BodyMemory(), body([*HISTORY, ASKED])
    bodies.parse("me", body(HISTORY))
    glanced = bodies.glance("me", sent, 1000)
    assert glanced == orjson.loads(sent)
    assert bodies.parse("you", sent) is not glanced
    assert bodies.parse("me", sent) is glanced
    again = bodies.parse("me", sent)
    assert again == glanced
    assert again is not glanced, "nothing is held for ever"
