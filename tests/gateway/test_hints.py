"""Names of sessions and marks reach the worker as hints, from every dialect, and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from served import Served

from gateway.canonical import parse_messages
from gateway.conversation import Conversation
from gateway.hints import MAX_MARKS, hinted, mark_seconds, user_of
from gateway.prompts import PromptMaker
from protocol.messages import Generate, Hint, ModelInfo, Sampling

MODEL = ModelInfo("tiny", "llama", "float32", "cpu", 607, 4096, 1, 1, 1, 4, True)
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USER = {"role": "user", "content": "hi"}


def hint_of(maker: PromptMaker, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """The prompt of a chat, and its hint."""
    conversation = Conversation(parse_messages(messages), **fields)
    prompt = maker.chat(conversation, MODEL)
    request = Generate("r", prompt.token_ids, prompt.boundaries, Sampling(5))
    return prompt, hinted(request, conversation, headers or {}).hint


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (MARK, 300),
        (HOUR, 3600),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "9h"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": 7}}, 300),
        ([{}, "x", MARK, HOUR], 3600),
        ({"cache_control": None}, 0),
        ({"cache_control": {"type": "eternal"}}, 0),
        ({"cache_control": []}, 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_what_counts_as_a_mark(value: object, seconds: int):
    assert mark_seconds(value) == seconds


@pytest.mark.parametrize("metadata", [None, [], {}, {"user_id": 5}, {"user_id": None}])
def test_no_user_in_other_metadata(metadata: object):
    assert user_of(metadata) == ""


def test_a_mark_names_the_boundary_of_its_message(maker: PromptMaker):
    def part(**mark: object) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}

    history = [{"role": "system", "content": "Be brief."}, part(**HOUR), {"role": "assistant", "content": "A"}]
    prompt, hint = hint_of(maker, [*history, part(**MARK)], head_seconds=300)
    ends = [boundary.end for boundary in prompt.boundaries]
    assert [(mark.end, mark.seconds) for mark in hint.marks] == [(ends[0], 300), (ends[1], 3600), (ends[3], 300)]


def test_no_more_than_four_marks_the_first_and_the_deepest(maker: PromptMaker):
    messages = [{**USER, **MARK}, {"role": "assistant", "content": "A", **MARK}] * 4
    prompt, hint = hint_of(maker, [*messages, USER])
    ends = [boundary.end for boundary in prompt.boundaries]
    assert [mark.end for mark in hint.marks] == [ends[0], *ends[5:8]]
    assert len(hint.marks) == MAX_MARKS


def test_the_name_of_a_session_is_told_as_a_digest_only(maker: PromptMaker):
    _, first = hint_of(maker, [USER], session="alpha")
    _, again = hint_of(maker, [USER], {"x-session-affinity": "alpha"})
    _, other = hint_of(maker, [USER], {"x-claude-code-session-id": "beta"})
    _, none = hint_of(maker, [USER])
    assert first == again == Hint(first.session)
    assert len(first.session) == 8
    assert "alpha" not in first.session
    assert other.session not in ("", first.session)
    assert none is None


@given(marks=st.lists(st.sampled_from([{}, MARK, HOUR]), min_size=5, max_size=5), session=st.text(max_size=5))
def test_hints_change_neither_ids_nor_boundaries(maker: PromptMaker, marks: list[dict[str, Any]], session: str):
    plain = [{"role": ("user", "assistant")[at % 2], "content": f"message {at}"} for at in range(5)]
    marked = [{**message, **mark} for message, mark in zip(plain, marks, strict=True)]
    bare, _ = hint_of(maker, plain)
    prompt, hint = hint_of(maker, marked, session=session)
    assert prompt == bare
    ends = {boundary.end for boundary in prompt.boundaries}
    assert {mark.end for mark in hint.marks} <= ends if hint else not session and not any(marks)


TOOL = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": [USER], "prompt_cache_key": "k"}, True),
        ("/v1/chat/completions", {"messages": [{**USER, **MARK}]}, False),
        ("/v1/responses", {"input": "hi", "prompt_cache_key": "k"}, True),
        ("/v1/messages", {"messages": [USER], "metadata": {"user_id": "k"}, "max_tokens": 9}, True),
        (
            "/v1/messages",
            {"messages": [USER], "system": [{"type": "text", "text": "x", **MARK}], "max_tokens": 9},
            False,
        ),
        ("/v1/messages", {"messages": [USER], "tools": [{**TOOL, **HOUR}], "system": "x", "max_tokens": 9}, False),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, **HOUR}, False),
    ],
)
async def test_every_dialect_sends_them(
    served: Served, worker: FakeWorker, path: str, body: dict[str, Any], named: bool
):
    assert (await served.post(path, body)).status == 200
    hint = worker.requests[0].hint
    assert hint is not None
    assert bool(hint.session) is named
    assert len(hint.marks) == (not named)


async def test_completions_have_sessions_by_header(served: Served, worker: FakeWorker):
    await served.post("/v1/completions", {"prompt": "x"}, **{"x-session-affinity": "s"})
    await served.post("/v1/completions", {"prompt": "x"})
    assert [request.hint is not None for request in worker.requests] == [True, False]
