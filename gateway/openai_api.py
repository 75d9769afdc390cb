"""`/v1/chat/completions` and `/v1/completions`: from an HTTP body to the worker's requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from aiohttp import web

from gateway.canonical import Through, parse_messages, parse_tools
from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.hints import mark_seconds
from gateway.openai_answers import ChatAnswer, CompletionAnswer
from gateway.openai_params import (
    MAX_CHOICES,
    ChatParams,
    CommonParams,
    CompletionParams,
    parse_params,
    template_variables,
)
from gateway.prompts import Prompt, PromptMaker, token_id_array
from gateway.reply import ReplyReader
from gateway.service import REQUEST_ID, TENANT, Gateway
from gateway.tenants import Tenant
from gateway.tool_choice import ToolChoice, tool_choice
from protocol.errors import RequestError
from protocol.messages import Generate, ModelInfo

_AS_TEXT = ReplyReader()
_DEFAULT_COMPLETION_TOKENS = 16  # the API's own default; a chat's is whatever fits


async def chat_completions(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """Raises `ServeError`."""
    return await _answer(gateway, request, body, "chat")


async def completions(gateway: Gateway, request: web.Request, body: bytes) -> web.StreamResponse:
    """Raises `ServeError`."""
    return await _answer(gateway, request, body, "completion")


async def _answer(
    gateway: Gateway, request: web.Request, body: bytes, kind: Literal["chat", "completion"]
) -> web.StreamResponse:
    model = gateway.client.model()
    tenant = request[TENANT]
    read = partial(_read, gateway, model, body, kind, tenant)
    with gateway.metrics.tokenize.time():
        params, prompts, conversation, grammar = await gateway.work_on(body, tenant, read)
    request[REQUEST_ID] = request_id = gateway.free_id(request[REQUEST_ID])
    make = ChatAnswer if kind == "chat" else CompletionAnswer
    answer = make(request_id, params.model or gateway.model_names[0], gateway.maker.token_bytes, params)
    requests = _requests(request_id, prompts, params, gateway.maker, model, grammar)
    absorbed = conversation if params.cache_prompt is not False else None
    reader = _AS_TEXT if conversation is None else _reader(gateway, conversation, prompts[0], params, grammar)
    stops, stream = params.stop or (), bool(params.stream)
    return await gateway.answer(request, requests, stops, answer, stream, absorbed, reader)


def _reader(
    gateway: Gateway, conversation: Conversation, prompt: Prompt, params: CommonParams, grammar: str | None
) -> ReplyReader:
    assert isinstance(params, ChatParams)
    return gateway.readers.reader(
        conversation,
        prompt,
        calls=params.tool_choice != "none",
        one_call=params.parallel_tool_calls is False,
        held=grammar is not None,
    )


def _read(
    gateway: Gateway, model: ModelInfo, body: bytes, kind: str, tenant: Tenant
) -> tuple[CommonParams, list[Prompt], Conversation | None, str | None]:
    """Everything between the body and the token ids, the conversation if there is one, and its answers' grammar."""
    maker, settings = gateway.maker, gateway.settings
    fields = maker.bodies.parse(tenant.name, body)
    params = parse_params("chat" if kind == "chat" else "completion", fields)
    if settings.strict_model and params.model is not None and params.model not in gateway.model_names:
        raise unknown_model(params.model)
    if isinstance(params, ChatParams):
        through = partial(maker.said.parsed, tenant.name, len(body))
        choice = tool_choice(params.tool_choice, fields.get("tools"))
        conversation = _conversation(fields, params, settings, choice, through)
        demand = choice.demand(fields.get("tools"), params.form)
        prompt = maker.chat(conversation, model, tenant)
        grammar = gateway.readers.grammar(
            conversation, prompt, demand, calls=choice.calls, many=params.parallel_tool_calls is True
        )
        return params, [prompt], conversation, grammar
    assert isinstance(params, CompletionParams)
    given = _prompts(fields.get("prompt"), maker.tokenizer.vocab_size)
    return params, [maker.completion(prompt, model, tenant) for prompt in given], None, None


def unknown_model(name: str) -> RequestError:
    """The answer to a name that is not served."""
    return RequestError(f"the model {name!r} does not exist", param="model", code="model_not_found", status=404)


def _conversation(
    fields: dict[str, Any], params: ChatParams, settings: GatewaySettings, choice: ToolChoice, through: Through
) -> Conversation:
    drop = settings.drop_billing_header
    messages = parse_messages(fields.get("messages"), drop_billing_header=drop, through=through)
    # With `tool_choice` none too: without its tools, the head of the prompt would be another one.
    tools = parse_tools(fields.get("tools"), in_order=settings.canonical_tool_order)
    variables = template_variables(params.chat_template_kwargs, params.effort, params.thinks)
    return Conversation(
        messages,
        tools,
        variables,
        allowed=choice.allowed,
        session=params.prompt_cache_key or "",
        head_seconds=mark_seconds(fields.get("tools")),
    )


def _prompts(value: object, vocab_size: int) -> list[str | array[int]]:
    """A prompt may be text or token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt must be text, a list of token ids, or a list of these", param="prompt")
    if all(isinstance(item, int) for item in value):
        return [token_id_array(value, vocab_size, "prompt")]
    if len(value) > MAX_CHOICES:
        raise RequestError(f"prompt holds more than {MAX_CHOICES} prompts", param="prompt")
    prompts: list[str | array[int]] = []
    for at, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(token_id_array(item, vocab_size, f"prompt.{at}"))
        else:
            raise RequestError(f"prompt.{at} is neither text nor token ids", param=f"prompt.{at}")
    return prompts


def _requests(
    request_id: str,
    prompts: Sequence[Prompt],
    params: CommonParams,
    maker: PromptMaker,
    model: ModelInfo,
    grammar: str | None,
) -> list[Generate]:
    requests: list[Generate] = []
    for at, prompt in enumerate(prompts):
        room = model.max_model_len - len(prompt.token_ids)
        if isinstance(params, CompletionParams) and params.asked_tokens is None:
            room = min(room, _DEFAULT_COMPLETION_TOKENS)
        requests.append(
            Generate(
                request_id if len(prompts) == 1 else f"{request_id}.{at}",
                prompt.token_ids,
                prompt.boundaries,
                params.sampling(room, maker.end_token_ids, model.vocab_size, grammar),
                params.choices,
                params.cache_prompt is not False,
            )
        )
    return requests


def model_list(names: Sequence[str], created: int, max_model_len: int | None) -> dict[str, Any]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [model_entry(name, created, max_model_len) for name in names]}


def model_entry(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """The body of `/v1/models/{id}`."""
    entry: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "prefixd"}
    return entry if max_model_len is None else entry | {"max_model_len": max_model_len}
