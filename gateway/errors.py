"""Every `ServeError` as an HTTP answer, in the shape of either API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import CapacityError, RequestError, ServeError, WorkerFailure, WorkerUnavailable
from protocol.messages import Failed


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a refused or failed request is told: status, words and extra headers."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The JSON body of Anthropic's API."""
        kinds = _ANTHROPIC_TYPES
        kind = kinds.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    @property
    def anthropic_status(self) -> int:
        """Anthropic's API has a status of its own for too much work."""
        return 529 if self.code == _OVERLOADED and self.status == 503 else self.status


_OVERLOADED = "overloaded"
_MAX_WORDS = 1000  # characters; what a client sent may be part of them
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {
    403: "permission_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_answer(error: ServeError) -> ErrorAnswer:
    """The one place where errors get their status."""
    match error:
        case RequestError():
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            return ErrorAnswer(
                error.status, _clipped(str(error)), error.param and _clipped(error.param), error.code, headers
            )
        case CapacityError():
            later = {"Retry-After": str(error.retry_after_seconds)}
            return ErrorAnswer(error.status, str(error), code=_OVERLOADED, headers=later)
        case WorkerUnavailable():
            return ErrorAnswer(503, str(error), code="worker_unavailable", headers={"Retry-After": "2"})
        case _:
            return ErrorAnswer(500, str(error), code="internal_error")


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_WORDS else text[:_MAX_WORDS] + "..."


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
