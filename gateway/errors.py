"""Every `ServeError` as an HTTP answer in the shape of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import CapacityError, RequestError, ServeError, WorkerFailure, WorkerUnavailable
from protocol.messages import Failed


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, JSON body and extra headers of a refused or failed request."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def answer(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """An error that is no `ServeError`, such as a path that does not exist."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return ErrorAnswer(status, {"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_answer(error: ServeError) -> ErrorAnswer:
    """The one place where errors get their status."""
    match error:
        case RequestError():
            return answer(error.status, str(error), param=error.param, code=error.code)
        case CapacityError():
            found = answer(error.status, str(error), code="overloaded")
            return ErrorAnswer(found.status, found.body, {"Retry-After": str(error.retry_after_seconds)})
        case WorkerUnavailable():
            found = answer(503, str(error), code="worker_unavailable")
            return ErrorAnswer(found.status, found.body, {"Retry-After": "2"})
        case _:
            return answer(500, str(error), code="internal_error")


def failure(event: Failed) -> ServeError:
    """What the worker's `Failed` means for the caller."""
    match event.code:
        case "invalid":
            return RequestError(event.message)
        case "too_long":
            return RequestError(event.message, code="context_length_exceeded")
        case "queue_full":
            return CapacityError(event.message)
        case "out_of_memory":
            return CapacityError(event.message, status=503)
        case "stopping" | "loading":
            return WorkerUnavailable(event.message)
        case "internal":
            return WorkerFailure(event.message)
