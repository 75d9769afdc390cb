"""`/v1/responses`, for clients that send the whole conversation each time: nothing is stored."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from aiohttp import web

from gateway.conversation import Conversation
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
        read = await gateway.in_thread(partial(_read, gateway, model, body, tenant), body)
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


def _read(gateway: Gateway, model: ModelInfo, body: bytes, tenant: Tenant) -> _Read:
    """Everything between the body and the token ids; runs on a thread."""
    fields = gateway.maker.bodies.parse(tenant.name, body)
    params = parse_params(fields)
    settings = gateway.settings
    if settings.strict_model and params.model is not None and params.model not in gateway.model_names:
        raise unknown_model(params.model)
    messages = parse_input(params.instructions, fields.get("input"))
    # With `tool_choice` none too: without its tools, the head of the prompt would be another one.
    tools = parse_tools(fields.get("tools"), in_order=settings.canonical_tool_order)
    variables = template_variables(params.chat_template_kwargs, params.effort)
    choice = tool_choice(params.tool_choice, fields.get("tools"))
    conversation = Conversation(
        messages, tools.functions, variables, allowed=choice.allowed, session=params.prompt_cache_key or ""
    )
    try:
        prompt = gateway.maker.chat(conversation, model, tenant)
    except RequestError as error:
        if error.param == "messages":  # the name that the other dialects have for it
            error.param = "input"
        raise
    demand = choice.demand(fields.get("tools"), params.form)
    grammar = gateway.readers.grammar(
        conversation, prompt, demand, calls=choice.calls, many=params.parallel_tool_calls is True
    )
    return _Read(params, tools, conversation, prompt, grammar)
