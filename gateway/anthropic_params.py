"""The fields of Anthropic bodies other than system text, messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.openai_params import MAX_STOPS, CommonParams, Stop, checked, template_variables
from protocol.errors import RequestError


class Thinking(BaseModel):
    """`thinking`. Budgets are not kept: a model of ours thinks as long as it wants."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["enabled", "adaptive", "disabled"]


class ToolChoice(BaseModel):
    """`tool_choice`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["auto", "none", "any", "tool"]
    disable_parallel_tool_use: bool | None = None


class MessagesParams(CommonParams):
    """`POST /v1/messages` and its `count_tokens`. The fields of `CommonParams` are taken here, too."""

    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def calls(self) -> bool:
        """Tools may be called."""
        return self.tool_choice is None or self.tool_choice.type != "none"

    @property
    def one_call(self) -> bool:
        """At most one of them, once."""
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True

    def variables(self) -> dict[str, Any]:
        """For the template, under both names that templates have for it; nothing asked for leaves it its default."""
        variables = template_variables(self.chat_template_kwargs, None)
        if self.thinking is None:
            return variables
        return dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled") | variables


def parse_params(body: dict[str, Any], *, to_count: bool = False) -> MessagesParams:
    """Check a body's fields. Raises `RequestError` naming the first wrong one."""
    params = checked(MessagesParams, body)
    if params.max_tokens is None and not to_count:
        raise RequestError("max_tokens: Field required", param="max_tokens")
    if params.tool_choice is not None and params.tool_choice.type in ("any", "tool"):
        raise RequestError("tool_choice can only be auto or none here", param="tool_choice")
    if params.choices != 1:
        raise RequestError("n can only be 1 here", param="n")
    return params
