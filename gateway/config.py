"""Settings of the gateway process."""

from __future__ import annotations

from pydantic import Field

from protocol.limits import MAX_BODY_BYTES
from protocol.settings import Names, ProcessSettings, Size, UserPath


class GatewaySettings(ProcessSettings):
    """What the HTTP side needs to know before it starts."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one and prints it")
    served_model_name: Names = Field((), description="one more name under which the model is listed; repeatable")
    strict_model: bool = Field(False, description="answer 404 for model names that are not listed")
    chat_template: UserPath | None = Field(None, description="Jinja file to use instead of the model's template")
    drop_billing_header: bool = Field(
        True, description="leave out the line of telemetry that Claude Code puts before its system text"
    )
    canonical_tool_order: bool = Field(
        False, description="sort tools by name and the keys of their schemas, so that their order makes no miss"
    )
    absorb: bool = Field(
        True, description="have the worker compute finished answers in idle time, as the next turn will send them"
    )
    max_body_bytes: Size = Field(MAX_BODY_BYTES, gt=0, description="largest request body")
    keepalive_seconds: float = Field(5.0, gt=0, description="silence after which a stream gets a comment line")
    grace_seconds: float = Field(30.0, ge=0, description="time that open requests get to end at shutdown")
