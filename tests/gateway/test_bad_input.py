"""What no client should send: each kind is refused with its exact words, in the dialect it was sent in."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker
from request_bodies import CHAT, COUNT, PATHS, PLAIN, RESPONSES, USER, anthropic, chat, responses, say
from served import Served

from gateway.canonical import parse_arguments

CALLS = {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
ASKED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
MISSING = "is missing: it must be a string or a list of parts"
UNCALLED = "is the result of a tool, but no message before it can have called one"
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
TEXT_ONLY = "this model takes text only"
EXACT = {
    "unknown role": (
        chat(say("hi", "robot")),
        "messages.0.role must be one of system, developer, user, assistant, tool, function",
    ),
    "unknown role, messages": (
        anthropic(say("hi", "developer")),
        "messages.0.role must be one of user, assistant, system",
    ),
    "unknown role, responses": (
        responses(say("hi", "tool")),
        "input.0.role must be one of system, developer, user, assistant",
    ),
    "image": (
        chat(say([{"type": "image_url", "image_url": {"url": "data:,"}}])),
        f"messages.0.content.0 has type 'image_url': {TEXT_ONLY}",
    ),
    "audio": (
        chat(say(["x", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])),
        f"messages.0.content.1 has type 'input_audio': {TEXT_ONLY}",
    ),
    "file": (chat(say([{"type": "file", "file": {}}])), f"messages.0.content.0 has type 'file': {TEXT_ONLY}"),
    "image, messages": (
        anthropic(say([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}])),
        "messages.0.content.0 has type 'image', which this model does not take here",
    ),
    "document, messages": (
        anthropic(say([{"type": "document", "source": PDF}])),
        "messages.0.content.0.source has type 'base64': this model takes text only, so send the document's text",
    ),
    "image, responses": (
        responses(say([{"type": "input_image", "image_url": "data:,"}])),
        f"input.0.content.0 has type 'input_image': {TEXT_ONLY}",
    ),
    "audio, responses": (
        responses(say([{"type": "input_audio", "input_audio": {}}])),
        f"input.0.content.0 has type 'input_audio': {TEXT_ONLY}",
    ),
    "result without a call": (
        chat(USER, {"role": "tool", "tool_call_id": "a", "content": "x"}),
        f"messages.1 {UNCALLED}",
    ),
    "result without a call, messages": (
        anthropic(say([{"type": "tool_result", "tool_use_id": "a", "content": "x"}])),
        f"messages.0 {UNCALLED}",
    ),
    "result without a call, responses": (
        responses(USER, {"type": "function_call_output", "call_id": "a", "output": "x"}),
        f"input.1 {UNCALLED}",
    ),
    "long name": (chat(USER, model="m" * 1025), "model: String should have at most 1024 characters"),
    "wrong type": (chat(USER, max_tokens="9"), "max_tokens: Input should be a valid integer"),
    "wrong type, messages": (anthropic(USER, stream="yes"), "stream: Input should be a valid boolean"),
    "wrong type, responses": (responses(USER, temperature=[]), "temperature: Input should be a valid number"),
    "no content": (chat(USER, {"role": "user"}), f"messages.1.content {MISSING}"),
    "no content, null": (chat(say(None, "system"), USER), f"messages.0.content {MISSING}"),
    "no content, of a result": (
        chat(USER, say(None, "assistant") | CALLS, {"role": "tool", "tool_call_id": "a"}),
        f"messages.2.content {MISSING}",
    ),
    "no content, of an answer": (
        chat(USER, {"role": "assistant", "tool_calls": [], "reasoning": " "}, USER),
        "messages.1.content is missing: only a message with tool_calls can do without",
    ),
    "no content, messages": (anthropic(say(None)), "messages.0.content must be a string or a list of blocks"),
    "no content, responses": (responses(USER, {"role": "assistant"}), f"input.1.content {MISSING}"),
    "no output": (
        responses(USER, ASKED, {"type": "function_call_output", "call_id": "a"}),
        f"input.2.output {MISSING}",
    ),
    "image in a result, messages": (
        anthropic(USER, say([USE], "assistant"), say([RESULT | {"content": [{"type": "image", "source": {}}]}])),
        f"messages.2.content.0.content.0 has type 'image': {TEXT_ONLY}",
    ),
    "old tools": (chat(USER, functions=[{"name": "f"}]), "functions is not supported: send them as tools"),
    "sound": (chat(USER, modalities=["text", "audio"]), "modalities.1: Input should be 'text'"),
    "no list": ((CHAT, {"messages": "hi"}), "messages must be a list"),
    "no text": ((RESPONSES, {"input": 5}), "input must be a string or a list of items"),
    "no prompt": ((PLAIN, {"prompt": {}}), "prompt must be text, a list of token ids, or a list of these"),
    "nothing to count": ((COUNT, {}), "messages must be a list"),
}


@pytest.mark.parametrize(("sent", "words"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_exact_words(
    served: Served, worker: FakeWorker, sent: tuple[str, dict[str, Any]], words: str, stream: bool
):
    path, body = sent
    response = await served.post(path, {"stream": stream, **body})
    told = await response.json()
    assert (response.status, told["error"]["message"]) == (400, words)
    assert told["error"]["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    assert not worker.requests


async def test_results_of_calls_and_answers_that_say_something_else_than_text_are_taken(served: Served):
    patched = {"type": "apply_patch_call_output", "call_id": "a", "status": "completed"}
    failed = {
        "type": "mcp_call",
        "id": "b",
        "name": "f",
        "arguments": "{}",
        "error": {"type": "x", "message": "no"},
    }
    for path, body in (
        chat(USER, {"role": "assistant", **CALLS}, {"role": "tool", "tool_call_id": "a", "content": "x"}),
        chat(USER, say(None, "assistant") | {"reasoning_content": "Hm."}, USER),
        chat(USER, say(None, "assistant") | {"refusal": "No."}, USER),
        anthropic(USER, say([USE], "assistant"), say([RESULT, {"type": "text", "text": "and"}])),
        responses(USER, ASKED, {"type": "function_call_output", "call_id": "a", "output": "x"}),
        responses(USER, ASKED, patched, failed),
    ):
        response = await served.post(path, body)
        assert response.status == 200, await response.text()


RAW = {
    "nothing": (b"", "the body is not JSON: "),
    "half": (b'{"messages": [', "the body is not JSON: "),
    "list": (b"[]", "the body must be a JSON object"),
    "utf-8": (b'{"messages": "\xff"}', "the body is not JSON: "),
    "half a utf-8": (b'{"messages": "\xe2\x82"}', "the body is not JSON: "),
    "utf-16": ('{"messages": []}'.encode("utf-16"), "the body is not JSON: "),
    "constant": (b'{"temperature": NaN}', "the body is not JSON: "),
    "brackets": (b"[" * 1_000_000, "the body is not JSON: "),
}


@pytest.mark.parametrize(("raw", "words"), RAW.values(), ids=RAW)
@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_are_no_json_objects(
    served: Served, worker: FakeWorker, path: str, raw: bytes, words: str
):
    response = await served.http.post(served.url + path, data=raw)
    error = (await response.json())["error"]
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(words)
    assert not worker.requests


def nested(depth: int, key: str = "items", inner: object = None) -> object:
    value: object = inner or {}
    for _ in range(depth):
        value = {key: value}
    return value


NESTED = {
    "variables": lambda value: chat(USER, chat_template_kwargs={"x": value}),
    "tool": lambda value: chat(USER, tools=[{"type": "function", "function": {"name": "f", "parameters": value}}]),
    "forced": lambda value: chat(
        USER, tool_choice="required", tools=[{"type": "function", "function": {"name": "f", "parameters": value}}]
    ),
    "schema": lambda value: chat(USER, response_format={"type": "json_schema", "json_schema": {"schema": value}}),
    "arguments": lambda value: chat(
        USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
    ),
    "unknown": lambda value: chat(USER, unknown=value),
    "tool, messages": lambda value: anthropic(USER, tools=[{"name": "f", "input_schema": value}]),
    "use": lambda value: anthropic(
        USER, say([{"type": "tool_use", "id": "a", "name": "f", "input": value}], "assistant")
    ),
    "tool, responses": lambda value: responses(
        USER, tools=[{"type": "function", "name": "f", "parameters": value}]
    ),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("depth", [100, 128, 900])
async def test_deep_nesting_is_served_or_refused(served: Served, worker: FakeWorker, make: Any, depth: int):
    path, body = make(nested(depth))
    response = await served.post(path, body)
    told = await response.json()
    if depth > 100:
        assert (response.status, told["error"]["message"]) == (400, "the body is nested more than 128 deep")
    else:
        assert response.status in (200, 400), told
    assert bool(worker.requests) is (response.status == 200)


@pytest.mark.parametrize(("depth", "stays"), [(128, False), (129, True), (950, True), (100_000, True)])
def test_deep_arguments_in_a_string_stay_text(depth: int, stays: bool):
    text = "[" * depth + "]" * depth
    assert (parse_arguments(text, "arguments") == text) is stays


@pytest.mark.parametrize("arguments", ['{"t": "\\\\ud83d"}', '{"\\\\ud83d": [1]}'])
async def test_half_a_character_in_arguments_is_taken(served: Served, worker: FakeWorker, arguments: str):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments.replace("\\\\", "\\")}}
    messages = [say("q"), {"role": "assistant", "content": None, "tool_calls": [call]}, say("r")]
    response = await served.post(CHAT, {"messages": messages})
    assert response.status == 200, await response.text()
