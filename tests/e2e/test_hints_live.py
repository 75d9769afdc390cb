"""Hints of clients in a running daemon: the operator sees them, and nothing is found or answered by them."""

from __future__ import annotations

from typing import Any

from chat_model import words
from conftest import Served
from http_client import assistant, system, user

HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PASSES = 3  # what a prompt of this test is computed in, at least


def marked(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"], **HOUR}]}


def test_a_marked_head_and_a_session_are_seen_in_their_slots(served: Served):
    head, question = system(words("hinted head", 90)), user(words("hinted", 60))
    served.client.chat([marked(head), question], prompt_cache_key="my-session")
    slots = {slot["kind"]: slot for slot in served.daemon.snapshots()}
    assert (slots["head"]["hold_seconds"], slots["message"]["hold_seconds"]) == (12 * 3600, 0)
    assert slots["head"]["session"] == slots["message"]["session"] != ""
    shown = served.daemon.cachectl("show", slots["head"]["slot"]).stdout
    assert slots["head"]["session"] in shown
    assert "for 12.0h after its last use" in shown
    assert "my-session" not in shown


def test_a_session_finds_nothing_and_a_mark_changes_no_answer(served: Served):
    head, question = system(words("plain head", 90)), user(words("plain", 60))
    plain = served.client.chat([head, question])
    served.daemon.flush()
    hinted = served.client.chat([marked(head), marked(question)], prompt_cache_key="one")
    assert (hinted.text, hinted.prompt_tokens, hinted.cached_tokens) == (plain.text, plain.prompt_tokens, 0)
    other = served.client.chat([system(words("another", 90)), user("other")], prompt_cache_key="one")
    assert other.cached_tokens == 0
    again = served.client.chat([head, question, assistant("Yes."), user("more")], prompt_cache_key="two")
    assert again.cached_tokens > 0


def test_prefill_tells_how_far_it_is(served: Served):
    with served.client.stream([user(words("progress", 3000))], max_tokens=2, return_progress=True) as stream:
        events = list(stream)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    reached = [each["processed"] for each in told]
    assert len(reached) >= PASSES
    assert reached == sorted(set(reached))
    assert reached[-1] == told[-1]["total"]
    assert {each["cache"] for each in told} == {0}
