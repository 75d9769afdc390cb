"""`/v1/messages` and `/v1/messages/count_tokens`: from an HTTP body to the worker's request, or to a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from gateway.anthropic_answers import MessageAnswer
from gateway.anthropic_input import parse_messages
from gateway.anthropic_params import MessagesParams, parse_params
from gateway.anthropic_tools import parse_tools
from gateway.conversation import Conversation
from gateway.grammar import Demand
from gateway.hints import mark_seconds, user_of
from gateway.openai_api import unknown_model
from gateway.prompts import Prompt
from gateway.service import REQUEST_ID, TENANT, Gateway
from gateway.tenants import Tenant
from protocol.messages import Generate, ModelInfo


async def messages(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """Raises `ServeError`."""
    model, tenant = gateway.client.model(), request[TENANT]

    def read() -> tuple[MessagesParams, Conversation, Prompt, str | None]:
        params, conversation, demand = _read(gateway, body, tenant, to_count=False)
        prompt = gateway.maker.chat(conversation, model, tenant)
        grammar = gateway.readers.grammar(conversation, prompt, demand, calls=params.calls, many=params.many_calls)
        return params, conversation, prompt, grammar

    with gateway.metrics.tokenize.time():
        params, conversation, prompt, grammar = await gateway.work_on(body, tenant, read)
    request[REQUEST_ID] = request_id = gateway.free_id(request[REQUEST_ID])
    reader = gateway.readers.reader(
        conversation, prompt, calls=params.calls, one_call=params.one_call, held=grammar is not None
    )
    caches = params.cache_prompt is not False
    return await gateway.answer(
        request,
        [_generate(gateway, request_id, prompt, params, model, caches, grammar)],
        params.stop_sequences or (),
        MessageAnswer(request_id, params.model or gateway.model_names[0], is_silent=params.is_silent),
        bool(params.stream),
        conversation if caches and not params.is_silent else None,
        reader,
    )


async def count_tokens(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """All of the input that `messages` would report, in sum; the worker has no part in it. Raises `ServeError`."""
    model = gateway.client.model()

    def count() -> int:
        _, conversation, _ = _read(gateway, body, request[TENANT], to_count=True)
        return gateway.maker.count(conversation, model, request[TENANT])

    counted = {"input_tokens": await gateway.work_on(body, request[TENANT], count)}
    return web.Response(body=orjson.dumps(counted), content_type="application/json")


def _read(
    gateway: Gateway, body: bytes, tenant: Tenant, *, to_count: bool
) -> tuple[MessagesParams, Conversation, Demand | None]:
    maker, settings = gateway.maker, gateway.settings
    fields = maker.bodies.parse(tenant.name, body)
    params = parse_params(fields, to_count=to_count)
    if settings.strict_model and params.model is not None and params.model not in gateway.model_names:
        raise unknown_model(params.model)
    # With `tool_choice` none too: without its tools, the head of the prompt would be another one.
    tools = parse_tools(fields.get("tools"), in_order=settings.canonical_tool_order)
    told = parse_messages(
        fields.get("system"),
        fields.get("messages"),
        tools,
        drop_billing_header=settings.drop_billing_header,
        through=partial(maker.said_in_blocks.parsed, tenant.name, len(body)),
    )
    if seconds := mark_seconds(fields):  # on the whole request: it marks what comes last
        told = (*told[:-1], replace(told[-1], mark_seconds=seconds))
    conversation = Conversation(
        told,
        tools.shown,
        params.variables(),
        loaded=tools.loaded,
        session=user_of(fields.get("metadata")),
        head_seconds=mark_seconds(fields.get("tools")),
    )
    return params, conversation, params.demand(fields.get("tools"))


def _generate(
    gateway: Gateway,
    request_id: str,
    prompt: Prompt,
    params: MessagesParams,
    model: ModelInfo,
    caches: bool,
    grammar: str | None,
) -> Generate:
    room = model.max_model_len - len(prompt.token_ids)
    sampling = params.sampling(room, gateway.maker.end_token_ids, model.vocab_size, grammar)
    return Generate(request_id, prompt.token_ids, prompt.boundaries, sampling, cache_prompt=caches)


def model_list(names: Sequence[str], created: int, max_model_len: int | None) -> dict[str, Any]:
    """The body of `/v1/models` for Anthropic's clients."""
    models = [model_entry(name, created, max_model_len) for name in names]
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model_entry(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """The body of `/v1/models/{id}` for Anthropic's clients. Prompt and answer share one context."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
