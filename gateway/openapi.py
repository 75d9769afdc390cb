"""`/openapi.json`: every endpoint of the gateway with what it takes and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import orjson

from gateway.openapi_inputs import TEXT, Schema, either, input_components, ref
from gateway.openapi_outputs import output_components

_Error = Literal["OpenAIError", "AnthropicError"]

_JSON, _STREAM, _PLAIN = "application/json", "text/event-stream", "text/plain"
_KEY_REFUSALS = {
    401: "Keys are asked for here, and the request bears none of them",
    403: "The key is an administrator's where one of a tenant is wanted, or the other way round",
}
_REFUSALS = {
    400: "The request cannot be served as it is; the error names the field",
    **_KEY_REFUSALS,
    404: "The model is not served here (with `strict_model`)",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Too many requests are waiting; try again after `retry-after` seconds",
    500: "A fault of the server; its log has more under the request's id",
    503: "The worker cannot serve now; try again after `retry-after` seconds",
}
_OVERLOADED = 529
_EVENTS: Schema = {"description": "Server-sent events of this API's own grammar; comments fill a silence"}


@cache
def openapi_json() -> bytes:
    """The description, as it is served."""
    return orjson.dumps(description())


def description() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "prefixd",
            "version": version("prefixd"),
            "description": "Unknown fields and query strings are ignored. Every answer has an `x-request-id`.",
        },
        "paths": {
            "/": {"get": _open("The name of the server, and its models if no keys are asked for", "Root")},
            "/health": {"get": _open("Whether this process is up", "Health")},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _guarded("This document", {200: _answer("OpenAPI 3.1", {_JSON: {}})})},
            "/v1/models": {"get": _models("All names of the model", "Models")},
            "/v1/models/{id}": {"get": _model()},
            "/v1/chat/completions": {"post": _generation("Chat completions", "ChatBody", "Chat")},
            "/v1/completions": {"post": _generation("Plain completions", "CompletionBody", "Completion")},
            "/v1/responses": {"post": _generation("Responses, none of them stored", "ResponsesBody", "Response")},
            "/v1/responses/input_tokens": {
                "post": _post(
                    "The input tokens that a response would have",
                    "ResponsesCountBody",
                    {_JSON: "ResponsesTokenCount"},
                    "OpenAIError",
                )
            },
            "/v1/messages": {
                "post": _generation("Messages", "MessagesBody", "MessageAnswer", error="AnthropicError")
            },
            "/v1/messages/count_tokens": {
                "post": _post(
                    "The input tokens that messages would have",
                    "CountBody",
                    {_JSON: "TokenCount"},
                    "AnthropicError",
                )
            },
        },
        "security": [{}, {"Bearer": []}, {"Key": []}],
        "components": {
            "securitySchemes": {
                "Bearer": {"type": "http", "scheme": "bearer"},
                "Key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {**input_components(), **output_components()},
            "headers": {
                "RequestId": {"schema": TEXT, "description": "The client's own id where it sent a plain one"},
                "Cache": {
                    "schema": TEXT,
                    "description": "`outcome; depth=tokens; reason=why`, and `; exact=no` where what it started from "
                    "was computed with other numerics. A stream may begin before this is known",
                },
            },
        },
    }


def _operation(summary: str, answers: dict[int, Schema], **more: Any) -> Schema:
    return {"summary": summary, **more, "responses": {str(status): answer for status, answer in answers.items()}}


def _answer(about: str, content: dict[str, Schema], *, cache: bool = False) -> Schema:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    if cache:
        headers["x-prefixd-cache"] = {"$ref": "#/components/headers/Cache"}
    return {
        "description": about,
        "headers": headers,
        "content": {kind: {"schema": schema} for kind, schema in content.items()},
    }


def _refused(about: str, error: _Error) -> Schema:
    return _answer(about, {_JSON: ref(error)})


def _open(summary: str, component: str) -> Schema:
    return _operation(summary, {200: _answer(summary, {_JSON: ref(component)})}, security=[])


def _guarded(summary: str, answers: dict[int, Schema]) -> Schema:
    refusals = {status: _refused(about, "OpenAIError") for status, about in _KEY_REFUSALS.items()}
    return _operation(summary, {**answers, **refusals})


def _metrics() -> Schema:
    answers = {
        200: _answer("Metrics", {_PLAIN: TEXT}),
        404: _refused("With `metrics_port` they are on a port of their own", "OpenAIError"),
    }
    return _guarded("Metrics for Prometheus", answers)


def _ready() -> Schema:
    answers = {
        200: _answer("Requests are served", {_JSON: ref("Readiness")}),
        503: _answer("They are not", {_JSON: ref("Readiness")}),
    }
    return _operation("Whether requests can be served now", answers, security=[])


def _model() -> Schema:
    name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    refusals = {**_KEY_REFUSALS, 404: "There is no such model"}
    return _models("The model under one of its names", "Model", name, refusals=refusals)


def _models(
    summary: str, component: str, *parameters: Schema, refusals: Mapping[int, str] = _KEY_REFUSALS
) -> Schema:
    """In the shapes of either API: a header says which."""
    version = {
        "name": "anthropic-version",
        "in": "header",
        "schema": TEXT,
        "description": "With it, the answer has the shapes of Anthropic's API",
    }
    error = either(ref("OpenAIError"), ref("AnthropicError"))
    answers = {200: _answer(summary, {_JSON: ref(component)})}
    for status, about in refusals.items():
        answers[status] = _answer(about, {_JSON: error})
    return _operation(summary, answers, parameters=[*parameters, version])


def _generation(summary: str, body: str, answer: str, error: _Error = "OpenAIError") -> Schema:
    return _post(summary, body, {_JSON: answer, _STREAM: None}, error)


def _post(summary: str, body: str, answers: dict[str, str | None], error: _Error) -> Schema:
    """A request with a JSON body. An answer without a component is a stream, asked for by `stream`."""
    content = {kind: _EVENTS if name is None else ref(name) for kind, name in answers.items()}
    refusals = dict(_REFUSALS)
    if error == "AnthropicError":
        refusals[_OVERLOADED] = "The worker has no memory left for this request; try again later"
    return _operation(
        summary,
        {
            200: _answer("The answer", content, cache=_STREAM in answers),
            **{status: _refused(about, error) for status, about in refusals.items()},
        },
        requestBody={"required": True, "content": {_JSON: {"schema": ref(body)}}},
    )
