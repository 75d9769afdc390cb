"""What clients may send that has no meaning here, or another form than most: taken, or refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker
from served import Served

from gateway.openai_params import OTHER_FORMS, ChatParams

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": ASKED, "max_tokens": 9},
}


def given(role: str, *content: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": role, "content": list(content)}, *ASKED]}


TAKEN: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"stop": None, "n": 1, "logit_bias": {}, "seed": -5, "top_p": 0, "temperature": 1},
        {"stop": [], "tools": [], "tool_choice": "none", "functions": [], "function_call": "auto"},
        {"stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "flex", "user": "u", "safety_identifier": "s"},
        {"modalities": ["text"], "audio": None, "prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {"search_context_size": "low"}, "verbosity": "low", "moderation": {"model": "x"}},
        {"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h", "prompt_cache_options": {}},
        {"tools": [{"type": "mcp", "server_label": "x"}], "parallel_tool_calls": False, "response_format": None},
        {"guided_json": None, "grammar": "", "structured_outputs": {}, "thinking": 3, "reasoning": "x"},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "developer", "content": "x", "name": "y"}]},
        {"messages": [*ASKED, {"role": "assistant", "refusal": "no"}, *ASKED]},
    ],
    COMPLETIONS: [
        {"echo": False, "suffix": "", "best_of": 1, "response_format": {"type": "text"}, "logprobs": None}
    ],
    RESPONSES: [
        {"previous_response_id": None, "conversation": None, "background": False, "prompt": None, "store": True},
        {"include": ["web_search_call.action.sources", "reasoning.encrypted_content"], "truncation": "auto"},
        {"service_tier": "priority", "max_tool_calls": 1, "text": {"verbosity": "low"}, "metadata": None},
        {"reasoning": {"effort": None, "context": "all_turns"}, "text": None, "top_logprobs": 2},
        {"context_management": [{"type": "compaction", "compact_threshold": 9}], "moderation": {"model": "x"}},
        {"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}], "instructions": ""},
    ],
    MESSAGES: [
        {"stop_sequences": [], "thinking": None, "metadata": None, "system": [], "tool_choice": None, "top_k": 0},
        {"container": "c", "mcp_servers": [{"type": "url", "url": "http://x", "name": "n"}], "betas": ["x"]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "service_tier": "auto"},
        {"output_config": {"effort": "max", "format": None, "task_budget": {"type": "tokens", "total": 9}}},
        {"thinking": {"type": "adaptive", "display": "omitted"}, "speed": "fast", "inference_geo": "us"},
        {"cache_control": None, "fallbacks": [{"model": "x"}], "user_profile_id": "x", "diagnostics": None},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f", "input_schema": {}, "eager_input_streaming": True, "input_examples": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}]}]},
        given("assistant", {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}),
        given(
            "assistant", {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "x", "citations": []}
        ),
        given("system", {"type": "text", "text": "x"}),
    ],
}
FORM: dict[str, Any] = {"type": "object"}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        *(({field: FORM}, field) for field in OTHER_FORMS),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"response_format": "json"}, "response_format"),
        ({"stream_options": True}, "stream_options"),
    ],
    COMPLETIONS: [
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    RESPONSES: [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0.type"),
        ({"text": "low"}, "text"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
    MESSAGES: [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        (given("user", {"type": "container_upload", "file_id": "f"}), "messages.1.content.0"),
        (given("assistant", {"type": "compaction", "content": "x"}), "messages.1.content.0"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ],
}


@pytest.mark.parametrize("path", BODIES)
async def test_what_means_nothing_here_changes_nothing(served: Served, worker: FakeWorker, path: str):
    await served.post(path, BODIES[path])
    for fields in TAKEN[path]:
        response = await served.post(path, BODIES[path] | fields)
        assert response.status == 200, fields
        if not {"messages", "tools"} & set(fields):
            assert worker.requests[-1].token_ids == worker.requests[0].token_ids, fields


@pytest.mark.parametrize("path", BODIES)
async def test_what_would_change_the_meaning_is_refused_by_its_name(served: Served, worker: FakeWorker, path: str):
    for fields, field in REFUSED[path]:
        response = await served.post(path, BODIES[path] | fields)
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (400, "invalid_request_error"), fields
        assert error["message"].startswith(field), error
        assert path == MESSAGES or error["param"] == field
        assert "ToolChoice" not in error["message"]
    assert not worker.requests


@pytest.mark.parametrize(
    ("fields", "thinks", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": False}, False, None),
        ({"thinking": {"type": "else"}}, None, None),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, False, None),
        ({"reasoning": {"effort": "low", "exclude": True}}, None, "low"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, None, "high"),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"enabled": "no", "effort": 3}}, None, None),
        ({"reasoning": ["low"], "thinking": []}, None, None),
    ],
)
def test_thinking_is_asked_for_in_any_of_the_forms_that_clients_have(
    fields: dict[str, Any], thinks: bool | None, effort: str | None
):
    params = ChatParams.model_validate(fields)
    assert (params.thinks, params.effort) == (thinks, effort)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
    ],
)
async def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(served: Served, path: str, meant: str):
    response = await served.http.post(served.url + path, json={})
    assert response.status == 404
    assert (await response.json())["error"]["message"] == f"there is nothing at {path}, but at {meant}"
