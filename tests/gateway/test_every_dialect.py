"""What holds in each of the three chat dialects alike: the refusal of a prompt that is too long, and going on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fake_worker import FakeWorker, ids_of, say
from served import Served

Turns = list[tuple[str, str]]


def chat(turns: Turns) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": role, "content": text} for role, text in turns]}


def messages(turns: Turns) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {**chat(turns)[1], "max_tokens": 50}


def responses(turns: Turns) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": chat(turns)[1]["messages"]}


Dialect = Callable[[Turns], tuple[str, dict[str, Any]]]
DIALECTS = [chat, messages, responses]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_refused_before_any_byte_with_both_counts(
    served: Served, worker: FakeWorker, dialect: Dialect, stream: bool
):
    path, body = dialect([("user", "word and " * 600)])
    response = await served.post(path, {**body, "stream": stream})
    assert response.status == 400
    assert response.headers["content-type"].startswith("application/json")
    told = await response.json()
    message = told["error"]["message"]
    # What the agents' own recognition looks for: the first form is Anthropic's, the second OpenAI's.
    counts = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert counts
    assert (int(counts[1]) > 511, int(counts[2])) == (True, 511)
    assert "maximum context length is 512 tokens" in message
    if path == "/v1/messages":
        assert told["type"] == "error"
        assert told["error"]["type"] == "invalid_request_error"
        assert told["request_id"] == response.headers["request-id"]
    else:
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["code"] == "context_length_exceeded"
        assert told["error"]["param"] in ("messages", "input")
    assert not worker.requests


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_one_token_less_than_the_context_is_served(served: Served, worker: FakeWorker, dialect: Dialect):
    empty = len(ids_of("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    for tokens, status in ((511, 200), (512, 400)):
        path, body = dialect([("user", "0" * (tokens - empty))])
        response = await served.post(path, body)
        assert response.status == status, await response.text()
    assert [len(request.token_ids) for request in worker.requests] == [511]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_last_assistant_message_goes_on_and_its_end_is_no_boundary(
    served: Served, worker: FakeWorker, dialect: Dialect
):
    worker.script = say("forty-two.")
    path, body = dialect([("user", "hi"), ("assistant", "The answer is ")])
    response = await served.post(path, body)
    assert response.status == 200
    request = worker.requests[0]
    asked = ids_of("<|im_start|>user\nhi<|im_end|>\n")
    assert list(request.token_ids) == asked + ids_of("<|im_start|>assistant\nThe answer is ")
    assert [boundary.end for boundary in request.boundaries] == [len(asked)]
    assert "forty" in await response.text()
    await served.until(lambda: bool(worker.absorbed))
    whole = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is forty-two.<|im_end|>\n")
    assert list(worker.absorbed[0].token_ids) == whole


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_assistant_message_with_another_behind_it_has_its_boundary(
    served: Served, worker: FakeWorker, dialect: Dialect
):
    path, body = dialect([("user", "hi"), ("assistant", "Hello."), ("user", "and?")])
    await served.post(path, body)
    assert [boundary.messages for boundary in worker.requests[0].boundaries] == [1, 2, 3]
