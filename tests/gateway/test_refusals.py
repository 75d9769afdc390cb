"""What is refused, with which status and field; and what is not."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc

import pytest
from fake_worker import FakeWorker
from served import Served

from protocol.limits import MAX_BODY_BYTES

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
LOOKUP = {"type": "function", "function": {"name": "lookup"}}

WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({}, "messages"),
    ({"messages": [USER, "hi"]}, "messages.1"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [USER, {"role": "user", "content": ["x", IMAGE]}]}, "messages.1.content.1"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stop": ""}, "stop.0"),
    ({"stop": 7}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"seed": "x"}, "seed"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
    ({"logit_bias": {"607": 1}}, "logit_bias.607"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias." + "1" * 64),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [LOOKUP], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [LOOKUP], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
    ({"tools": [LOOKUP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_wrong_field_is_named(served: Served, worker: FakeWorker, fields: dict, param: str):
    body = fields if param.startswith("messages") else {"messages": [USER], **fields}
    response = await served.post("/v1/chat/completions", body)
    error = (await response.json())["error"]
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert response.headers["x-request-id"]
    assert not worker.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", 3]}, "prompt.1"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [[1], [607]]}, "prompt.1.0"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
async def test_a_wrong_completion_field_is_named(served: Served, fields: dict, param: str):
    response = await served.post("/v1/completions", fields)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe{}",
        b'{"messages": NaN}',
        b'{"temperature": Infinity, "x": "\\ud800"}',
        b"[" * 100_000,
        b'{"x": "\\u00"}',
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(served: Served, raw: bytes):
    response = await served.http.post(served.url + "/v1/chat/completions", data=raw)
    assert response.status == 400
    assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_half_a_surrogate_pair_becomes_a_replacement_character(served: Served, worker: FakeWorker):
    raw = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    response = await served.http.post(served.url + "/v1/chat/completions", data=raw)
    assert response.status == 200
    assert (await response.json())["usage"]["prompt_tokens"] > 0


async def test_packed_bodies_are_read_and_unknown_packing_refused(served: Served):
    body = json.dumps({"messages": [USER]}).encode()
    url = served.url + "/v1/chat/completions"
    packed = await served.http.post(url, data=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    assert packed.status == 200
    unknown = await served.http.post(url, data=body, headers={"Content-Encoding": "zip"})
    assert unknown.status == 400
    broken = await served.http.post(url, data=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert broken.status == 400


async def test_a_body_over_the_limit_is_413_and_one_under_it_is_read(served: Served):
    url = served.url + "/v1/completions"
    large = b'{"prompt": "' + b"x" * (3 << 20) + b'"}'
    response = await served.http.post(url, data=io.BytesIO(large))
    assert (await response.json())["error"]["code"] == "context_length_exceeded"
    response = await served.http.post(url, data=io.BytesIO(b" " * (MAX_BODY_BYTES + 1)))
    assert response.status == 413
    assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_small_body_that_unpacks_to_a_large_one_is_413(served: Served):
    packed = gzip.compress(b" " * (5 * MAX_BODY_BYTES), compresslevel=1)
    assert len(packed) < 8 << 20
    tracemalloc.start()
    try:
        url = served.url + "/v1/completions"
        response = await served.http.post(url, data=io.BytesIO(packed), headers={"Content-Encoding": "gzip"})
        assert response.status == 413
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BODY_BYTES, "however much it is"
    finally:
        tracemalloc.stop()
    assert (await served.chat()).status == 200


async def test_other_paths_and_methods_get_json(served: Served):
    for path in ("/v2/x", "/api/tags", "/v1/props"):
        response = await served.http.get(served.url + path)
        assert response.status == 404
        assert "error" in await response.json()
    response = await served.http.get(served.url + "/v1/chat/completions")
    assert response.status == 405
    assert response.headers["Allow"] == "POST"
    assert "error" in await response.json()


async def test_a_variable_the_template_does_not_know_changes_nothing(served: Served):
    response = await served.chat(chat_template_kwargs={"loop": 1}, messages=[USER])
    assert response.status == 200


async def test_unknown_names_are_served_and_echoed(served: Served):
    body = await (await served.chat(model="gpt-x")).json()
    assert body["model"] == "gpt-x"


async def test_query_strings_are_ignored(served: Served):
    response = await served.post("/v1/chat/completions?beta=true", {"messages": [USER]})
    assert response.status == 200


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-1_2.3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_a_clients_request_id_is_kept_if_it_is_plain(
    served: Served, worker: FakeWorker, sent: str, kept: bool
):
    response = await served.post("/v1/chat/completions", {"messages": [USER]}, **{"x-request-id": sent})
    assert (response.headers["x-request-id"] == sent) is kept
    assert worker.requests[0].request_id == response.headers["x-request-id"]
