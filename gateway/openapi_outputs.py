"""What endpoints answer, as JSON schemas."""

from __future__ import annotations

from typing import get_args

from gateway.openapi_inputs import MAYBE_TEXT, NULL, OBJECT, TEXT, Schema, either, listed, record, ref, word
from protocol.messages import Outcome, Phase, Reason

_COUNT: Schema = {"type": "integer", "minimum": 0}
_SECONDS: Schema = {"type": "number", "minimum": 0}
_MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_FINISH = either(word("stop", "length", "tool_calls"), NULL)


def _whole(**properties: Schema) -> Schema:
    """An object that always has all of these fields."""
    return record(properties, *properties)


def output_components() -> dict[str, Schema]:
    """All components that answers are made of."""
    call = either(
        _whole(id=TEXT, type=word("function"), function=_whole(name=TEXT, arguments=TEXT)),
        _whole(id=TEXT, type=word("custom"), custom=_whole(name=TEXT, input=TEXT)),
    )
    message = record(
        {
            "role": word("assistant"),
            "content": MAYBE_TEXT,
            "reasoning_content": TEXT,
            "reasoning": TEXT,
            "tool_calls": listed(call),
        },
        "role",
        "content",
    )
    scores = either(OBJECT, NULL)
    return {
        "CacheReport": _whole(
            outcome=word(*get_args(Outcome)),
            depth=_COUNT,
            reason=word(*get_args(Reason)),
            exact={"type": "boolean"},
            diverged_message=_MAYBE_COUNT,
            diverged_token=_MAYBE_COUNT,
            queue_seconds=_SECONDS,
            prefill_seconds=_SECONDS,
        ),
        "OpenAIUsage": _whole(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_whole(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
            completion_tokens_details=_whole(reasoning_tokens=_COUNT),
        ),
        "Chat": _openai(
            "chat.completion", _whole(index=_COUNT, message=message, logprobs=scores, finish_reason=_FINISH)
        ),
        "Completion": _openai(
            "text_completion", _whole(index=_COUNT, text=TEXT, logprobs=scores, finish_reason=_FINISH)
        ),
        "MessageAnswer": _whole(
            id=TEXT,
            type=word("message"),
            role=word("assistant"),
            model=TEXT,
            content=listed(record({"type": word("text", "thinking", "tool_use")}, "type")),
            stop_reason=word("end_turn", "max_tokens", "tool_use", "stop_sequence"),
            stop_sequence=MAYBE_TEXT,
            usage=record(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                },
                "input_tokens",
                "cache_creation_input_tokens",
                "cache_read_input_tokens",
                "output_tokens",
            ),
            prefixd=ref("CacheReport"),
        ),
        "TokenCount": _whole(input_tokens=_COUNT),
        "ResponsesTokenCount": _whole(object=word("response.input_tokens"), input_tokens=_COUNT),
        "Response": record(
            {
                "id": TEXT,
                "object": word("response"),
                "created_at": _COUNT,
                "status": word("completed", "incomplete"),
                "model": TEXT,
                "output": listed(
                    record({"type": word("message", "reasoning", "function_call", "custom_tool_call")}, "type")
                ),
                "usage": _whole(
                    input_tokens=_COUNT,
                    input_tokens_details=_whole(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
                    output_tokens=_COUNT,
                    output_tokens_details=_whole(reasoning_tokens=_COUNT),
                    total_tokens=_COUNT,
                ),
                "prefixd": ref("CacheReport"),
            },
            *("id", "object", "created_at", "status", "model", "output", "usage", "prefixd"),
        ),
        "Model": either(
            record(
                {
                    "id": TEXT,
                    "object": word("model"),
                    "created": _COUNT,
                    "owned_by": TEXT,
                    "max_model_len": _COUNT,
                },
                *("id", "object", "created", "owned_by"),
            ),
            _whole(
                type=word("model"),
                id=TEXT,
                display_name=TEXT,
                created_at=TEXT,
                lifecycle=word("active"),
                max_input_tokens=_MAYBE_COUNT,
                max_tokens=_MAYBE_COUNT,
            ),
        ),
        "Models": either(
            _whole(object=word("list"), data=listed(ref("Model"))),
            _whole(data=listed(ref("Model")), has_more={"enum": [False]}, first_id=TEXT, last_id=TEXT),
        ),
        "Root": record({"name": word("prefixd"), "models": listed(TEXT)}, "name"),
        "Health": _whole(status=word("ok")),
        "Readiness": _whole(phase=word(*get_args(Phase), "unreachable"), detail=TEXT),
        "OpenAIError": _whole(error=_whole(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT)),
        "AnthropicError": _whole(type=word("error"), error=_whole(type=TEXT, message=TEXT), request_id=TEXT),
    }


def _openai(kind: str, choice: Schema) -> Schema:
    return _whole(
        id=TEXT,
        object=word(kind),
        created=_COUNT,
        model=TEXT,
        choices=listed(choice),
        usage=ref("OpenAIUsage"),
        prefixd=ref("CacheReport"),
    )
