"""Settings of the gateway process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.limits import MAX_BODY_BYTES
from protocol.settings import Names, ProcessSettings, Size, UserPath

ToolCallFormat = Literal[
    "auto",
    "none",
    "hermes",
    "llama",
    "mistral",
    "qwen_xml",
    "gemma4",
    "glm",
    "kimi",
    "deepseek_v3",
    "deepseek_v3_1",
    "harmony",
    "seed",
    "minicpm",
    "solar",
    "functionary",
    "apertus",
    "cohere",
    "command_r",
    "nemotron",
    "tool_calls",
    "functools",
    "gigachat",
    "muse",
]
ReasoningFormat = Literal[
    "auto", "none", "think", "gemma4", "mistral", "harmony", "seed", "cohere", "apertus", "solar", "muse"
]


class ServeSettings(ProcessSettings):
    """What `prefixd serve` needs to know beside the settings of the processes that it starts."""

    gateways: int = Field(1, ge=1, le=64, description="gateway processes that share the port")
    hung_seconds: float = Field(
        15.0, ge=2, description="silence after which a process that was ready counts as hung and is started again"
    )


class GatewaySettings(ProcessSettings):
    """What the HTTP side needs to know before it starts."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one and prints it")
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port for /metrics, for this machine alone and without a key; none: `port`",
    )
    served_model_name: Names = Field((), description="one more name under which the model is listed; repeatable")
    strict_model: bool = Field(False, description="answer 404 for model names that are not listed")
    api_keys: UserPath | None = Field(
        None,
        description="TOML file of API keys and tenants (see `prefixd keygen`); without one, everybody may ask",
    )
    ui: bool = Field(False, description="show a status page at /ui; where there are API keys, to admins alone")
    chat_template: UserPath | None = Field(None, description="Jinja file to use instead of the model's template")
    drop_billing_header: bool = Field(
        True, description="leave out the line of telemetry that Claude Code puts before its system text"
    )
    canonical_tool_order: bool = Field(
        False, description="sort tools by name and the keys of their schemas, so that their order makes no miss"
    )
    tool_call_format: ToolCallFormat = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does"
    )
    reasoning_format: ReasoningFormat = Field(
        "auto", description="how the model marks reasoning; auto: as its chat template does, none: it stays text"
    )
    absorb: bool = Field(
        True, description="have the worker compute finished answers in idle time, as the next turn will send them"
    )
    max_body_bytes: Size = Field(MAX_BODY_BYTES, gt=0, description="largest request body")
    header_seconds: float = Field(
        30.0, gt=0, description="time in which a request's first line and headers must arrive"
    )
    body_seconds: float = Field(60.0, gt=0, description="time in which a request's body must arrive")
    unread_seconds: float = Field(
        60.0, gt=0, description="time in which a client must read some of an answer, or it is cut off"
    )
    keepalive_seconds: float = Field(5.0, gt=0, description="silence after which a stream gets a comment line")
    grace_seconds: float = Field(30.0, ge=0, description="time that open requests get to end at shutdown")
