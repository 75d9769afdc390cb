"""Errors that say who can act. `gateway/errors.py` maps them to each API's own shape."""

from __future__ import annotations


class ServeError(Exception):
    """Base of all errors that a request can end with."""


class RequestError(ServeError):
    """The caller must change the request. `param` names the field, `code` is the API's machine-readable word."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class CapacityError(ServeError):
    """The caller may try again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: int = 1, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.status = status


class WorkerUnavailable(ServeError):
    """The worker is gone, starting or stopping: the operator's to mend."""


class WorkerFailure(ServeError):
    """The worker could not finish this one request: an internal fault, or memory."""


class ProtocolError(ServeError):
    """Frames, versions or types disagree: a fault of ours."""


class VersionMismatch(ProtocolError):
    """The other side speaks another version of the protocol: one of the two must be upgraded."""


class SettingsError(Exception):
    """A setting is nonsense. The message names it."""
