"""The fields of a Responses body other than input and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.demands import json_demand
from gateway.grammar import Demand
from gateway.openai_params import MAX_LOGPROBS, CommonParams, Count, Whole, checked
from protocol.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
# What would need responses, files or prompts to be stored here.
_STORED = {
    "previous_response_id": "nothing is stored here: send the whole conversation as input",
    "conversation": "nothing is stored here: send the whole conversation as input",
    "prompt": "no prompts are stored here: send instructions and input",
    "background": "nothing is stored here: wait for the answer, or stream it",
}


class Reasoning(BaseModel):
    """`reasoning`."""

    model_config = ConfigDict(frozen=True, strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its old name


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    wanted: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """`text`."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesParams(CommonParams):
    """`POST /v1/responses` without input and tools. The fields of `CommonParams` are taken here, too."""

    instructions: str | None = None
    max_output_tokens: Count | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_output_tokens or self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def seals_reasoning(self) -> bool:
        """The client wants reasoning in a form to send back."""
        return SEALED_REASONING in (self.include or ())

    @property
    def summary(self) -> str | None:
        """How the client wants reasoning told, if not as it is."""
        asked = self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)
        return asked if asked and asked != "none" else None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def form(self) -> Demand | None:
        """What form an answer without calls must have."""
        form = self.text.format if self.text else None
        return json_demand(form.type, form.wanted, "text.format") if form else None

    def refuse_unsupported(self) -> None:
        """Raises `RequestError` for what is understood but would be served wrongly."""
        if self.choices != 1:
            raise RequestError("n can only be 1 here", param="n")


def parse_params(body: dict[str, Any]) -> ResponsesParams:
    """Check a body's fields. Raises `RequestError` naming the first wrong one."""
    for field, remedy in _STORED.items():
        if body.get(field):
            raise RequestError(f"{field} is not supported: {remedy}", param=field)
    params = checked(ResponsesParams, body)
    params.refuse_unsupported()
    return params
