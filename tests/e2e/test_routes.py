"""Everything beside the answers: paths, names, health, bad bodies, large ones, ids, and the official client."""

from __future__ import annotations

import json

import openai
import pytest
from chat_model import words
from conftest import Served
from http_client import user

HELLO = [user("Hello")]


def test_paths(served: Served):
    client = served.client
    head = client.request("HEAD", "/")
    assert (head.status, head.raw) == (200, b"")
    assert client.get("/health").body == {"status": "ok"}
    assert client.get("/ready").body == {"phase": "ready", "detail": ""}
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")
    for method, path in (
        ("GET", "/v1/engines"),
        ("POST", "/api/show"),
        ("GET", "/props"),
        ("POST", "/v1/messagesx"),
    ):
        answer = client.request(method, path, {} if method == "POST" else None)
        assert answer.status == 404
        assert path in answer.error["message"]
        assert answer.headers["content-type"].startswith("application/json")
    wrong = client.get("/v1/chat/completions")
    assert wrong.status == 405
    assert "POST" in wrong.headers["allow"]
    assert (
        client.request("POST", "/v1/chat/completions?beta=true", {"messages": HELLO, "max_tokens": 1}).status
        == 200
    )


def test_models(served: Served, chat_model):
    listed = served.client.get("/v1/models").body
    names = [entry["id"] for entry in listed["data"]]
    assert set(names) == {str(chat_model), chat_model.name}
    assert served.client.get(f"/v1/models/{chat_model.name}").body["id"] == chat_model.name
    assert served.client.get("/v1/models/gpt-4").status == 404
    assert served.client.get("/v1/models/gpt-4").error["code"] == "model_not_found"
    assert served.client.chat(HELLO, model="gpt-4").body["model"] == "gpt-4", "any name is served, and echoed"


def test_strict_model_names(strict: Served):
    client = strict.client
    names = [entry["id"] for entry in client.get("/v1/models").body["data"]]
    assert names[:2] == ["house", "org/name"]
    assert client.get("/v1/models/org/name").status == 200
    for name in [*names, None]:
        assert client.chat(HELLO, model=name, max_tokens=1).status == 200
    refused = client.chat(HELLO, model="gpt-4")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "user", "content": 7}]}, "messages.1.content"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "temperature": 2.5}, "temperature"),
        ({"messages": HELLO, "top_p": -1}, "top_p"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": -3}, "max_completion_tokens"),
        ({"messages": HELLO, "n": 0}, "n"),
        ({"messages": HELLO, "stop": 5}, "stop"),
        ({"messages": HELLO, "logit_bias": {"cat": 1}}, "logit_bias.cat"),
        ({"messages": HELLO, "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"messages": HELLO, "seed": "x"}, "seed"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
        ({"messages": HELLO, "stream_options": {"include_usage": "no"}}, "stream_options.include_usage"),
        ({"messages": HELLO, "top_logprobs": 50, "logprobs": True}, "top_logprobs"),
        ({"messages": HELLO, "cache_prompt": "maybe"}, "cache_prompt"),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_field_is_refused_by_name(body: dict, field: str, served: Served):
    answer = served.client.request("POST", "/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == field
    assert field.split(".")[0] in answer.error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}'], ids=repr)
def test_a_body_that_is_no_json_object(body: bytes, served: Served):
    answer = served.client.request("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["message"]


def test_fields_that_mean_nothing_here_are_ignored(served: Served):
    known = served.client.chat(HELLO).text
    extra = {"store": False, "user": "u", "metadata": {"a": [1]}, "service_tier": "auto", "prompt_cache_key": "k"}
    assert served.client.chat(HELLO, **extra).text == known
    assert served.client.chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]).text == known
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert (
        served.client.chat([{"role": "user", "content": parts}]).text
        == served.client.chat([user("Hello\nthere")]).text
    )
    head = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert served.client.chat(head).text == served.client.chat([{**head[0], "role": "system"}, *HELLO]).text


def test_large_bodies(served: Served):
    """aiohttp's own limit is 1 MiB."""
    padded = served.client.chat(HELLO, metadata={"padding": "x" * 5_000_000})
    assert padded.text == served.client.chat(HELLO).text
    long = served.client.chat([user(words("five megabytes", 1_000_000))])
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


def test_request_ids(served: Served):
    mine = served.client.request(
        "POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, {"x-request-id": "mine-1"}
    )
    assert mine.request_id == "mine-1"
    assert mine.body["id"] == "chatcmpl-mine-1"
    assert json.loads(served.daemon.cachectl("--json", "explain", "mine-1").stdout)["request_id"] == "mine-1"
    made = {served.client.chat(HELLO, max_tokens=1).request_id for _ in range(3)}
    assert len(made) == 3
    assert served.client.get("/nowhere").request_id
    with served.client.stream(HELLO, {"x-request-id": "mine-2"}) as stream:
        assert stream.headers["x-request-id"] == "mine-2"
        assert next(iter(stream))["id"] == "chatcmpl-mine-2"


def test_the_official_client(served: Served, reference):
    """The `openai` package, streaming and not, for chats and completions."""
    hello = served.client.chat(HELLO)
    with openai.OpenAI(base_url=f"{served.client.url}/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.models.list().data[0].object == "model"
        fields = {"model": "any", "temperature": 0, "max_tokens": 12}
        chat = sdk.chat.completions.create(messages=HELLO, **fields)
        assert chat.choices[0].message.content == hello.text == reference.text(HELLO)
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage.prompt_tokens_details.cached_tokens == reference.history_tokens(HELLO)
        options = {"include_usage": True}
        with sdk.chat.completions.create(messages=HELLO, stream=True, stream_options=options, **fields) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == hello.text
        assert chunks[-1].usage == chat.usage
        plain = sdk.completions.create(prompt="Once upon a time", **fields)
        with sdk.completions.create(prompt="Once upon a time", stream=True, **fields) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
        assert plain.choices[0].text == reference.continuation(reference.plain_ids("Once upon a time"))
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.chat.completions.create(messages=HELLO, model="any", temperature=9)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("gpt-4")
