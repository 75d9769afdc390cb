"""Messages and tools of an OpenAI chat body, in the one form that equal conversations share.

Left out or made equal is what clients vary between turns without meaning it: text as a string or as parts, `""`
or null beside tool calls, blanks around an answer, spacing of tool arguments, ids, names and unknown fields. Marks
(`cache_control`) are kept beside what is said, as hints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from gateway.body import is_too_deep, mended
from gateway.conversation import JsonObject, Message, Role, ToolCall
from gateway.custom_tools import CUSTOM_FIELD, custom_function
from gateway.hints import mark_seconds
from protocol.errors import RequestError

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_FUNCTION_FIELDS = ("name", "description", "parameters")
# Claude Code's first system block: one line whose version number depends on the conversation's first message.
_BILLING_HEADER = re.compile(r"x-anthropic-billing-header: cc_version=[^\s;]+;[^\n]*(\n+|\Z)")

Through = Callable[[list[Any], Callable[[int], Message]], tuple[Message, ...]]


def parse_messages(
    value: object, *, drop_billing_header: bool = True, through: Through | None = None
) -> tuple[Message, ...]:
    """Raises `RequestError` naming the field that is wrong.

    `drop_billing_header` leaves out the telemetry line with which one client's system text begins. `through`
    has each item parsed that is not known from before (`SaidBefore.parsed`).
    """
    if not isinstance(value, list):
        raise wrong("messages", "must be a list")
    if not value:
        raise wrong("messages", "must not be empty")
    last = len(value) - 1

    def parse(at: int) -> Message:
        return _message(value[at], f"messages.{at}", last=at == last)

    messages = through(value, parse) if through else tuple(map(parse, range(len(value))))
    for at, message in enumerate(messages):
        if message.role == "assistant":
            break
        if message.role == "tool":
            raise uncalled(f"messages.{at}")
    if not drop_billing_header or messages[0].role != "system":
        return messages
    content = without_billing_header(messages[0].content)
    if content == messages[0].content:
        return messages
    return (replace(messages[0], content=content), *messages[1:]) if content or last == 0 else messages[1:]


def without_billing_header(system: str) -> str:
    """System text without the telemetry line at its very start. The same words anywhere else are left alone."""
    return _BILLING_HEADER.sub("", system, count=1) if _BILLING_HEADER.match(system) else system


def parse_tools(value: object, *, in_order: bool = False) -> tuple[dict[str, Any], ...]:
    """Function tools with the fields a template can use, free-form ones too; tools of other kinds are left out.

    `in_order` sorts tools by name and the keys of their schemas; lists in these, such as `enum`, keep their order.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", "must be a list")
    tools = tuple(tool for at, item in enumerate(value) for tool in _tool(item, f"tools.{at}"))
    return sorted_tools(tools) if in_order else tools


def sorted_tools(tools: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Function tools by name, with sorted keys."""
    return tuple(sorted((_sorted_keys(tool) for tool in tools), key=lambda tool: str(tool["function"]["name"])))


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


def _message(value: object, where: str, last: bool) -> Message:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    role = _ROLES.get(value["role"]) if isinstance(value.get("role"), str) else None
    if role is None:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    mark = mark_seconds(value, value.get("content"))
    if role == "assistant":
        return _assistant(value, where, last, mark)
    content = required_content(value, "content", where)
    if role == "tool":
        call_id, name = _text_or_none(value.get("tool_call_id")), _text_or_none(value.get("name"))
        return Message(role, content, tool_call_id=call_id, name=name, mark_seconds=mark)
    return Message(role, content, mark_seconds=mark)


def _assistant(value: dict[str, Any], where: str, last: bool, mark: int) -> Message:
    calls = tuple(_calls(value, where))
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    reasoning = reasoning.strip() if isinstance(reasoning, str) else ""
    given = value.get("content")
    if given is None:
        given = _text_or_none(value.get("refusal"))  # which answers of the API have in its place
    if given is None and not calls and not reasoning:
        raise wrong(f"{where}.content", "is missing: only a message with tool_calls can do without")
    content = parse_content(given, f"{where}.content")
    if not last or calls:
        content = content.strip()  # the text of a turn to be continued counts to its last blank
    return Message("assistant", content, calls, reasoning=reasoning or None, mark_seconds=mark)


def required_content(holder: dict[str, Any], field: str, where: str) -> str:
    """The text of a field that must be there, as `parse_content` has it. Raises `RequestError`."""
    if holder.get(field) is None:
        raise wrong(f"{where}.{field}", "is missing: it must be a string or a list of parts")
    return parse_content(holder[field], f"{where}.{field}")


def parse_content(value: object, where: str) -> str:
    """Text, null or text parts as one text. `where` names the field in errors. Raises `RequestError`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "must be a string, null or a list of parts")
    return "\n".join(_part(part, f"{where}.{at}") for at, part in enumerate(value))


def _part(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    kind = value.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise wrong(where, f"has type {kind!r}: this model takes text only")
    text = value.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise wrong(f"{where}.{_TEXT_PARTS[kind]}", "must be a string")
    return text


def _calls(message: dict[str, Any], where: str) -> Iterator[ToolCall]:
    value = message.get("tool_calls")
    if value is None:
        legacy = message.get("function_call")
        value = [{"function": legacy}] if legacy is not None else []
    if not isinstance(value, list):
        raise wrong(f"{where}.tool_calls", "must be a list")
    for at, call in enumerate(value):
        here = f"{where}.tool_calls.{at}"
        if isinstance(call, dict) and call.get("type") == "custom":
            yield _custom_call(call, here)
            continue
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong(f"{here}.function", "must be an object")
        if not isinstance(function.get("name"), str):
            raise wrong(f"{here}.function.name", "must be a string")
        arguments = parse_arguments(function.get("arguments"), f"{here}.function.arguments")
        yield ToolCall(_text_or_none(call.get("id")) or "", function["name"], arguments)


def _custom_call(call: dict[str, Any], where: str) -> ToolCall:
    custom = call.get("custom")
    if not isinstance(custom, dict):
        raise wrong(f"{where}.custom", "must be an object")
    for name in ("name", "input"):
        if not isinstance(custom.get(name), str):
            raise wrong(f"{where}.custom.{name}", "must be a string")
    return ToolCall(
        _text_or_none(call.get("id")) or "", custom["name"], JsonObject({CUSTOM_FIELD: custom["input"]})
    )


def parse_arguments(value: object, where: str) -> Any:
    """The parsed object; the text itself where a model once wrote something that is no JSON."""
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return JsonObject(value)
    if not isinstance(value, str):
        raise wrong(where, "must be a string of JSON")
    try:
        parsed = mended(json.loads(value))  # not orjson: it turns large whole numbers into floats
    except (ValueError, RecursionError):
        return value
    if is_too_deep(parsed):
        return value
    return JsonObject(parsed) if isinstance(parsed, dict) else parsed


def _tool(value: object, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    match value.get("type", "function"):
        case "function":
            yield function_tool(value.get("function"), f"{where}.function")
        case "custom":
            custom = value.get("custom")
            function = custom_function(custom) if isinstance(custom, dict) else None
            yield function_tool(function, f"{where}.custom")


def function_tool(function: object, where: str) -> dict[str, Any]:
    """A function with the fields a template can use. Raises `RequestError`."""
    if not isinstance(function, dict):
        raise wrong(where, "must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise wrong(f"{where}.name", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{where}.parameters", "must be an object")
    fields = {name: function[name] for name in _FUNCTION_FIELDS if function.get(name) is not None}
    # Templates read all of these without looking whether they are there.
    fields.setdefault("description", "")
    fields["parameters"] = dict(parameters or {"type": "object"})
    if fields["parameters"].get("type", "object") == "object":
        fields["parameters"].setdefault("properties", {})
    return JsonObject({"type": "function", "function": fields})


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def uncalled(field: str) -> RequestError:
    """The error of a tool's result before which the assistant has said nothing: calls may also be in its text."""
    return wrong(field, "is the result of a tool, but no message before it can have called one")


def wrong(field: str, problem: str) -> RequestError:
    """An error that names the field."""
    return RequestError(f"{field} {problem}", param=field)
