"""`/v1/responses` and `/v1/responses/input_tokens`: clients send the whole conversation, nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from gateway.conversation import Conversation, Message
from gateway.openai_api import unknown_model
from gateway.openai_params import template_variables
from gateway.prompts import Prompt
from gateway.responses_answers import ResponsesAnswer
from gateway.responses_input import parse_input
from gateway.responses_params import ResponsesParams, parse_params
from gateway.responses_tools import Tools, parse_tools
from gateway.service import REQUEST_ID, TENANT, Gateway
from gateway.tenants import Tenant
from gateway.tool_choice import tool_choice
from protocol.errors import RequestError
from protocol.messages import Generate, ModelInfo


class _Read(NamedTuple):
    params: ResponsesParams
    tools: Tools
    conversation: Conversation
    prompt: Prompt
    grammar: str | None


async def responses(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """Raises `ServeError`."""
    model, tenant = gateway.client.model(), request[TENANT]
    with gateway.metrics.tokenize.time():
        read = await gateway.work_on(body, tenant, partial(_read, gateway, model, body, tenant))
    params, prompt = read.params, read.prompt
    request[REQUEST_ID] = request_id = gateway.free_id(request[REQUEST_ID])
    name = params.model or gateway.model_names[0]
    answer = ResponsesAnswer(request_id, name, params, read.tools, gateway.maker.token_bytes)
    room = model.max_model_len - len(prompt.token_ids)
    cached = params.cache_prompt is not False
    generate = Generate(
        request_id,
        prompt.token_ids,
        prompt.boundaries,
        params.sampling(room, gateway.maker.end_token_ids, model.vocab_size, read.grammar),
        1,
        cached,
    )
    reader = gateway.readers.reader(
        read.conversation,
        prompt,
        calls=params.tool_choice != "none",
        one_call=params.parallel_tool_calls is False,
        held=read.grammar is not None,
    )
    absorbed = read.conversation if cached else None
    return await gateway.answer(
        request, [generate], params.stop or (), answer, bool(params.stream), absorbed, reader
    )


async def input_tokens(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """The input tokens that `responses` would report; the worker has no part in it. Raises `ServeError`."""
    model, tenant = gateway.client.model(), request[TENANT]

    def count() -> int:
        fields = gateway.maker.bodies.parse(tenant.name, body)
        params, given = parse_params(fields), fields.get("input")
        alone = params.instructions if given is None else None  # there need not be anything else to count
        messages = (Message("system", alone),) if alone else parse_input(params.instructions, given)
        conversation = _conversation(gateway, messages, params, _tools(gateway, fields))
        with _as_input():
            return gateway.maker.count(conversation, model, tenant)

    counted = {"object": "response.input_tokens", "input_tokens": await gateway.work_on(body, tenant, count)}
    return web.Response(body=orjson.dumps(counted), content_type="application/json")


def _read(gateway: Gateway, model: ModelInfo, body: bytes, tenant: Tenant) -> _Read:
    """Everything between the body and the token ids; runs on a thread."""
    fields = gateway.maker.bodies.parse(tenant.name, body)
    params, tools = parse_params(fields), _tools(gateway, fields)
    choice = tool_choice(params.tool_choice, fields.get("tools"))
    messages = parse_input(params.instructions, fields.get("input"))
    conversation = replace(_conversation(gateway, messages, params, tools), allowed=choice.allowed)
    with _as_input():
        prompt = gateway.maker.chat(conversation, model, tenant)
    demand = choice.demand(fields.get("tools"), params.form)
    grammar = gateway.readers.grammar(
        conversation, prompt, demand, calls=choice.calls, many=params.parallel_tool_calls is True
    )
    return _Read(params, tools, conversation, prompt, grammar)


def _tools(gateway: Gateway, fields: dict[str, Any]) -> Tools:
    """With `tool_choice` none too: without its tools, the head of the prompt would be another one."""
    return parse_tools(fields.get("tools"), in_order=gateway.settings.canonical_tool_order)


def _conversation(
    gateway: Gateway, messages: tuple[Message, ...], params: ResponsesParams, tools: Tools
) -> Conversation:
    if gateway.settings.strict_model and params.model is not None and params.model not in gateway.model_names:
        raise unknown_model(params.model)
    variables = template_variables(params.chat_template_kwargs, params.effort)
    return Conversation(messages, tools.functions, variables, session=params.prompt_cache_key or "")


@contextmanager
def _as_input() -> Iterator[None]:
    """Errors call the messages what this dialect does."""
    try:
        yield
    except RequestError as error:
        if error.param == "messages":
            error.param = "input"
        raise
