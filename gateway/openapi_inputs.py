"""The bodies that endpoints take, as JSON schemas: fields from the classes that check them, the rest written here.

What is written says what is read, not all that is let pass: fields without a meaning here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from gateway.anthropic_params import MessagesParams
from gateway.openai_params import MAX_CHOICES, OTHER_FORMS, OWN_VARIABLES, ChatParams, CompletionParams
from gateway.responses_params import ResponsesParams

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": _REF.format(model=name)}


def listed(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def either(*schemas: Schema, **more: Any) -> Schema:
    return {"anyOf": list(schemas), **more}


def record(properties: Mapping[str, Schema], *required: str, **more: Any) -> Schema:
    """An object; `required` names the fields it cannot lack."""
    return {"type": "object", "properties": dict(properties), "required": list(required), **more}


def word(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_NAME: Schema = {"type": "string", "minLength": 1}
_WORDS: Schema = {"type": "string", "pattern": "\\S"}
_LENIENT: Schema = {"description": "Text; what is something else is ignored, or written as the template writes it"}
_ARGUMENTS = either(TEXT, OBJECT, NULL, description="JSON of the arguments, or the object itself")
_TOKENS = listed({"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}, minItems=1)
_CONTENT, _MAYBE_CONTENT = ref("Content"), either(ref("Content"), NULL)
_HINT = {"cache_control": ref("CacheControl")}
_THOUGHTS = listed(record({"text": TEXT}, "text"))
_FUNCTION = {"name": _NAME, "description": _LENIENT, "parameters": {"type": ["object", "null"]}}
_TEXT_BLOCK = record({"type": word("text"), "text": TEXT, **_HINT}, "type", "text")

_NOTHING: Schema = {"enum": [None, False, 0, "", [], {}], "description": "Not supported"}
_NAMED = record({"name": TEXT}, "name")
_GIVEN = (ref("Document"), ref("SearchResult"))


def _spoken(role: str, *blocks: Schema) -> Schema:
    content = either(TEXT, listed(either(*blocks)))
    return record({"role": word(role), "content": content}, "role", "content")


def _said(fields: Mapping[str, Schema], *required: str) -> Schema:
    """A message of a chat's assistant."""
    thoughts = {"reasoning_content": _LENIENT, "reasoning": _LENIENT}
    return record({"role": word("assistant"), **thoughts, **fields}, "role", *required)


def _other_than(*kinds: object) -> Schema:
    """A tool of another kind, whatever else it holds."""
    return record({"type": {"not": {"enum": list(kinds)}}}, "type")


_PARTS: dict[str, Schema] = {
    "CacheControl": {
        "description": "`ephemeral`, with a `ttl` of 5m or 1h: a hint to keep what is computed up to here. It changes "
        "neither the prompt nor what is found, and what is no such hint is ignored",
        "examples": [{"type": "ephemeral", "ttl": "1h"}],
    },
    "Content": either(TEXT, ref("Parts")),
    "Parts": listed(
        either(
            TEXT,
            record({"type": word("text", "input_text", "output_text"), "text": TEXT, **_HINT}, "text"),
            record({"type": word("refusal"), "refusal": TEXT}, "type", "refusal"),
        ),
        description="Parts of a text. Those of other kinds, such as images and audio, are refused",
    ),
    "ChatMessage": either(
        record({"role": word("system", "developer", "user"), "content": _CONTENT}, "role", "content"),
        _said({"content": _CONTENT, "tool_calls": either(listed(ref("ChatCall")), NULL)}, "content"),
        *(
            _said({"content": _MAYBE_CONTENT} | instead, *instead)
            for instead in (
                {"tool_calls": listed(ref("ChatCall"), minItems=1)},
                {"reasoning_content": _WORDS},
                {"reasoning": _WORDS},
                {"refusal": _NAME},
            )
        ),
        record(
            {"role": word("tool"), "content": _CONTENT, "tool_call_id": _LENIENT, "name": _LENIENT},
            "role",
            "content",
        ),
        description="An assistant's, as the last message, is the beginning of the answer",
    ),
    "ChatCall": either(
        record(
            {
                "id": _LENIENT,
                "type": {"not": {"enum": ["custom"]}},
                "function": record({"name": TEXT, "arguments": _ARGUMENTS}, "name"),
            },
            "function",
        ),
        record(
            {
                "id": _LENIENT,
                "type": word("custom"),
                "custom": record({"name": TEXT, "input": TEXT}, "name", "input"),
            },
            *("type", "custom"),
        ),
    ),
    "ChatTool": either(
        record({"type": word("function"), "function": record(_FUNCTION, "name")}, "function"),
        record(
            {"type": word("custom"), "custom": record({"name": _NAME, "description": _LENIENT}, "name")}, "custom"
        ),
        _other_than("function", "custom"),
    ),
    "Document": record(
        {
            "type": word("document"),
            "source": either(
                record({"type": word("text"), "data": TEXT}, "type", "data"),
                record({"type": word("content"), "content": _CONTENT}, "type", "content"),
            ),
            "title": MAYBE_TEXT,
            "context": MAYBE_TEXT,
            **_HINT,
        },
        "type",
        "source",
        description="Text with tags around it. Documents that are no text are refused, citations are not made",
    ),
    "SearchResult": record(
        {
            "type": word("search_result"),
            "source": TEXT,
            "title": TEXT,
            "content": ref("Parts"),
            **_HINT,
        },
        *("type", "source", "title", "content"),
    ),
    "Message": either(
        _spoken("system", _TEXT_BLOCK),
        _spoken(
            "user",
            _TEXT_BLOCK,
            *_GIVEN,
            record(
                {
                    "type": word("tool_result"),
                    "tool_use_id": TEXT,
                    "content": either(_MAYBE_CONTENT, listed(either(_TEXT_BLOCK, *_GIVEN))),
                    **_HINT,
                },
                "type",
                "tool_use_id",
            ),
        ),
        _spoken(
            "assistant",
            _TEXT_BLOCK,
            record({"type": word("thinking"), "thinking": TEXT, "signature": _LENIENT}, "type", "thinking"),
            record(
                {"type": word("tool_use"), "id": TEXT, "name": TEXT, "input": _ARGUMENTS}, "type", "id", "name"
            ),
        ),
    ),
    "MessagesTool": either(
        record({"name": _NAME, "description": _LENIENT, "input_schema": OBJECT, **_HINT}, "name", "input_schema"),
        _other_than("custom", "", None, False, 0, [], {}),
    ),
    "InputItem": either(
        record(
            {
                "type": word("message"),
                "role": word("system", "developer", "user", "assistant"),
                "content": _CONTENT,
            },
            "role",
            "content",
        ),
        record(
            {
                "type": word("reasoning"),
                "summary": _THOUGHTS,
                "content": either(_THOUGHTS, NULL),
                "encrypted_content": _LENIENT,
            },
            "type",
        ),
        record(
            {"type": word("function_call"), "call_id": _LENIENT, "name": _NAME, "arguments": _ARGUMENTS},
            "type",
            "name",
        ),
        record(
            {"type": word("custom_tool_call"), "call_id": _LENIENT, "name": _NAME, "input": TEXT},
            "type",
            "name",
            "input",
        ),
        record(
            {
                "type": word("function_call_output", "custom_tool_call_output"),
                "call_id": _LENIENT,
                "output": _CONTENT,
            },
            "type",
            "output",
        ),
    ),
    "ResponsesTool": either(
        ref("ResponsesFunction"),
        record(
            {
                "type": word("namespace"),
                "name": _NAME,
                "tools": listed(either(ref("ResponsesFunction"), _other_than("function", "custom"))),
            },
            "type",
            "name",
            "tools",
        ),
        _other_than("function", "custom", "namespace"),
    ),
    "ResponsesFunction": either(
        record({"type": word("function"), **_FUNCTION}, "name"),
        record({"type": word("custom"), "name": _NAME, "description": _LENIENT}, "type", "name"),
    ),
}


class _Untitled(GenerateJsonSchema):
    """Fields need no titles that only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _tools(kind: str) -> Schema:
    return either(
        listed(ref(kind)), NULL, description="Tools of kinds without a name here are left out of the prompt"
    )


def input_components() -> dict[str, Schema]:
    """All components that bodies are made of; `ChatBody`, `CompletionBody`, `MessagesBody` and so on are whole."""
    classes = (ChatParams, CompletionParams, MessagesParams, ResponsesParams)
    _, known = models_json_schema(
        [(each, "validation") for each in classes], ref_template=_REF, schema_generator=_Untitled
    )
    parts: dict[str, Schema] = known["$defs"]
    chat, completion, messages, responses = (parts.pop(each.__name__)["properties"] for each in classes)
    variables = OBJECT | {"propertyNames": {"not": {"enum": list(OWN_VARIABLES)}}}
    for fields in (chat, messages, responses):
        fields["chat_template_kwargs"] = either(variables, NULL)
    for fields in (messages, responses):
        fields["n"] = {"enum": [1, None]}
        del fields["stream_options"], fields["return_progress"]
    del messages["stop"]  # its name is `stop_sequences` there
    dialogue = {
        "messages": listed(ref("Message"), minItems=1),
        "system": _MAYBE_CONTENT,
        "tools": _tools("MessagesTool"),
    }
    most = {
        "type": "integer",
        "minimum": 0,
        "maximum": 1 << 31,
        "description": "0 computes and keeps the prompt, and says nothing",
    }
    spoken = responses | {
        "input": either(TEXT, listed(ref("InputItem"), minItems=1)),
        "tools": _tools("ResponsesTool"),
        "tool_choice": _choice(name=TEXT),
    }
    prompt = either(_NAME, _TOKENS, listed(either(_NAME, _TOKENS), minItems=1, maxItems=MAX_CHOICES))
    return {
        **parts,
        **_PARTS,
        "ChatBody": record(
            chat
            | {
                "messages": listed(ref("ChatMessage"), minItems=1),
                "functions": {"enum": [[], None]},
                "function_call": {"not": OBJECT},
                **_no_other_form(),
                "tools": _tools("ChatTool"),
                "tool_choice": _choice(function=_NAMED, custom=_NAMED),
            },
            "messages",
        ),
        "CompletionBody": record(
            completion
            | {"prompt": prompt, "echo": {"enum": [False, None]}, "suffix": {"enum": ["", None]}}
            | {"response_format": {"enum": [*_NOTHING["enum"], {"type": "text"}]}, **_no_other_form()},
            "prompt",
        ),
        "MessagesBody": record(messages | dialogue | {"max_tokens": most}, "messages", "max_tokens"),
        "CountBody": record(messages | dialogue, "messages"),
        "ResponsesBody": record(spoken, "input"),
        "ResponsesCountBody": either(
            record(spoken, "input"),
            record(spoken | {"input": NULL, "instructions": _NAME}, "instructions"),
        ),
    }


def _no_other_form() -> dict[str, Schema]:
    return dict.fromkeys(OTHER_FORMS, _NOTHING)


def _choice(**named: Schema) -> Schema:
    """`named` is what tells one tool: the object or the text of that name."""
    ones = (
        record({"type": word("function", "custom") if key == "name" else word(key), key: each}, "type", key)
        for key, each in named.items()
    )
    some = {"mode": word("auto", "required"), "tools": listed(OBJECT)}
    allowed = {"type": word("allowed_tools")}
    inside = record(allowed | {"allowed_tools": record(some, *some)}, "type", "allowed_tools")
    return either(word("auto", "none", "required"), *ones, inside, record(allowed | some, "type", *some), NULL)
