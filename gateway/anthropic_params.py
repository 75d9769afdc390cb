"""The fields of Anthropic bodies other than system text, messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.demands import free_demand, strict_tools
from gateway.grammar import Demand
from gateway.openai_params import CommonParams, Stops, Whole, checked, template_variables
from protocol.errors import RequestError


class Thinking(BaseModel):
    """`thinking`. Budgets are not kept: a model of ours thinks as long as it wants.

    Nor is `display`: what was thought is told even where it should be left out, as the next prompt needs it back.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["enabled", "adaptive", "disabled"]


class ToolChoice(BaseModel):
    """`tool_choice`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel):
    """`output_config.format`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["json_schema"]
    wanted: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`. Its effort is not kept: a model of ours has no such measure."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: OutputFormat | None = None


class MessagesParams(CommonParams):
    """`POST /v1/messages` and its `count_tokens`. The fields of `CommonParams` are taken here, too."""

    stop_sequences: Stops | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where `output_config.format` stood before
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31), Whole] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_silent(self) -> bool:
        """The prompt is to be computed and kept, and nothing said. A token is sampled all the same, and dropped."""
        return self.max_tokens == 0

    @property
    def asked_tokens(self) -> int | None:
        return 1 if self.is_silent else self.max_tokens

    @property
    def calls(self) -> bool:
        """Tools may be called."""
        return self.tool_choice is None or self.tool_choice.type != "none"

    @property
    def one_call(self) -> bool:
        """At most one of them, once."""
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is True

    @property
    def many_calls(self) -> bool:
        """Several are asked for where one must come."""
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is False

    def demand(self, tools: object) -> Demand | None:
        """What form the answer must have."""
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool"):
            name = choice.name if choice.type == "tool" else None
            return Demand("tool_choice", tool=name, strict=strict_tools(tools))
        form = self.output_config.format if self.output_config else None
        if form is not None:
            return Demand("output_config.format", form.wanted)
        if self.output_format is not None:
            return Demand("output_format", self.output_format.wanted)
        return free_demand(tools) if self.calls else None

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
    if params.tool_choice is not None and params.tool_choice.type == "tool" and params.tool_choice.name is None:
        raise RequestError("tool_choice.name: Field required", param="tool_choice.name")
    if params.choices != 1:
        raise RequestError("n can only be 1 here", param="n")
    return params
