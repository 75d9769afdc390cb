"""The fields of OpenAI requests other than the prompt: checked, named when wrong, and turned into `Sampling`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gateway.custom_tools import custom_names
from gateway.demands import ResponseFormat
from gateway.grammar import Demand
from protocol.errors import RequestError
from protocol.messages import Sampling

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_NAME = 1024  # characters
MAX_LOGPROBS = 20
_ID_DIGITS = 20  # of a token id written out, leading zeros too: int() refuses thousands
_TOKEN_NAMES = {"propertyNames": {"pattern": f"^[0-9]{{1,{_ID_DIGITS}}}$"}}  # checked by `_bias`
_SEED_MASK = (1 << 63) - 1

Fields = TypeVar("Fields", bound=BaseModel)
# What other servers have for the form of an answer: without it, nothing would be as it was asked for.
OTHER_FORMS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("grammar", "json_schema", "regex", "ebnf"),
)
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


def _whole_number(value: object) -> object:
    """5.0 is 5: JavaScript clients do not tell them apart."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Whole = BeforeValidator(_whole_number)
Count = Annotated[int, Field(ge=1, le=1 << 31), Whole]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(frozen=True, strict=True)

    include_usage: bool | None = None


class CommonParams(BaseModel):
    """What chat and plain completions share. Null means the default, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None  # every chunk of a stream repeats it
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), Whole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024, json_schema_extra=_TOKEN_NAMES)] | None = None
    seed: Annotated[int, Whole] | None = None
    stop: Annotated[Stops, BeforeValidator(_one_or_many, json_schema_input_type=Stop | Stops)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def asked_tokens(self) -> int | None:
        """New tokens asked for; None for as many as fit."""
        return self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """How many alternatives to each token are asked for; None for no log-probabilities at all."""
        return None

    def sampling(
        self, room: int, end_token_ids: frozenset[int], vocab_size: int, grammar: str | None = None
    ) -> Sampling:
        """`room` is the number of new tokens that fit in the context, at least 1."""
        top_k = self.top_k or 0
        return Sampling(
            max_tokens=min(self.asked_tokens or room, room),
            temperature=_or(self.temperature, 1.0),
            top_p=max(_or(self.top_p, 1.0), 1e-6),  # 0 asks for the best token alone
            top_k=max(top_k, 0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=_bias(self.logit_bias or {}, vocab_size),
            seed=None if self.seed is None else self.seed & _SEED_MASK,
            logprobs=self.asked_logprobs,
            stop_token_ids=() if self.ignore_eos else tuple(sorted(end_token_ids)),
            grammar=grammar,
        )


class ChatParams(CommonParams):
    """`POST /v1/chat/completions` without messages and tools; `custom` are the names of those that are free-form."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
    reasoning: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    functions: list[Any] | None = None  # the old name of `tools`
    function_call: Any = None  # and of `tool_choice`
    custom: Annotated[frozenset[str], BeforeValidator(custom_names)] = Field(frozenset(), validation_alias="tools")

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> str | None:
        """How much to think, which some clients say in an object."""
        match self.reasoning:
            case {"effort": str(effort)} if self.reasoning_effort is None:
                return effort
        return self.reasoning_effort

    @property
    def thinks(self) -> bool | None:
        """Whether to think at all, in any of the ways that clients have to say so; what is none of them is ignored."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        match self.thinking, self.reasoning:
            case (bool(thinks), _) | ({"type": "enabled" | "adaptive" | "disabled" as thinks}, _):
                return thinks not in (False, "disabled")
            case _, {"enabled": bool(thinks)}:
                return thinks
        return None

    @property
    def form(self) -> Demand | None:
        """What form an answer without calls must have. Raises `RequestError`."""
        return self.response_format.demand("response_format") if self.response_format else None

    def refuse_unsupported(self) -> None:
        """Raises `RequestError` for what is understood but would be served wrongly."""
        if self.functions:
            raise RequestError("functions is not supported: send them as tools", param="functions")
        if isinstance(self.function_call, dict):
            raise RequestError("function_call is not supported: send it as tool_choice", param="function_call")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")


class CompletionParams(CommonParams):
    """`POST /v1/completions` without the prompt."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1), Whole] | None = None
    response_format: Any = None

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Raises `RequestError` for what is understood but would be served wrongly."""
        if self.echo:
            raise RequestError("echo is not supported", param="echo")
        if self.response_format and self.response_format != {"type": "text"}:
            raise RequestError("response_format is not supported here: ask in a chat", param="response_format")
        if self.suffix:
            raise RequestError("suffix is not supported", param="suffix")
        if self.best_of is not None and self.best_of != self.choices:
            raise RequestError("best_of can only equal n here", param="best_of")


def template_variables(
    given: dict[str, Any] | None, effort: str | None, thinking: bool | None = None
) -> dict[str, Any]:
    """What the template gets besides messages and tools; `given` comes before the fields that mean the same.

    Raises `RequestError` for names that are not the client's.
    """
    variables = dict(given or {})
    for name in OWN_VARIABLES:
        if name in variables:
            field = f"chat_template_kwargs.{name}"
            raise RequestError(f"{field} cannot be set", param=field)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if thinking is None and effort == "none":
        thinking = False  # most templates know a switch only
    if thinking is not None:
        variables.setdefault("enable_thinking", thinking)
    return variables


def checked(fields: type[Fields], body: dict[str, Any]) -> Fields:
    """The fields of a body. Raises `RequestError` naming the first wrong one."""
    try:
        return fields.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = "Input should be an object" if first["type"] in ("model_type", "dict_type") else first["msg"]
        raise RequestError(f"{field}: {problem}", param=field) from error


def parse_params(kind: Literal["chat", "completion"], body: dict[str, Any]) -> ChatParams | CompletionParams:
    """Check a body's fields. Raises `RequestError` naming the first wrong one."""
    for field in OTHER_FORMS:
        if body.get(field):
            raise RequestError(f"{field} is not supported: ask for a form with response_format", param=field)
    params = checked(ChatParams, body) if kind == "chat" else checked(CompletionParams, body)
    params.refuse_unsupported()
    return params


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _bias(value: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, weight in value.items():
        known = token.isascii() and token.isdigit() and len(token) <= _ID_DIGITS and int(token) < vocab_size
        if not known:
            raise RequestError(
                f"logit_bias: {token[:64]!r} is no token id of this model", param=f"logit_bias.{token[:64]}"
            )
        bias[int(token)] = float(weight)
    return bias
