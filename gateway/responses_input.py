"""Input items of a Responses body as messages, in the canonical form that chat completions share.

What a model said in one turn comes as several items (reasoning, text, calls) and is one message here. Left out
are item ids and statuses, and calls whose results only the service that ran them knows.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from gateway.canonical import parse_arguments, parse_content, required_content, uncalled, wrong
from gateway.conversation import Message, Role, ToolCall
from gateway.custom_tools import CUSTOM_FIELD
from gateway.responses_tools import function_name

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SEALED = "prefixd.1."  # begins `encrypted_content` of our own making
_HOSTED = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_RESULTS = frozenset(
    {
        "apply_patch_call_output",
        "custom_tool_call_output",
        "function_call_output",
        "local_shell_call_output",
        "shell_call_output",
    }
)


def parse_input(instructions: str | None, value: object) -> tuple[Message, ...]:
    """Messages of `instructions` and `input`. Raises `RequestError` naming the field that is wrong."""
    system = (Message("system", instructions),) if instructions else ()
    if isinstance(value, str):
        return (*system, Message("user", value))
    if not isinstance(value, list):
        raise wrong("input", "must be a string or a list of items")
    history = _History()
    for at, item in enumerate(value):
        history.add(item, f"input.{at}")
    messages = history.finish()
    if not messages:
        raise wrong("input", "must not be empty")
    return (*system, *messages)


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send nothing else of it back. It hides nothing."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(value: object) -> str:
    """The text in `encrypted_content` made by `seal`; nothing where another service or nobody made it."""
    if not isinstance(value, str) or not value.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


class _History:
    """Messages so far, and the assistant's turn that the latest items belong to."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, item: object, where: str) -> None:
        if not isinstance(item, dict):
            raise wrong(where, "must be an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str):
            raise wrong(f"{where}.type", "must be a string")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            if self._texts or self._calls:
                self._end_turn()
            self._reasoning.append(_reasoning(item, where))
        elif kind in _RESULTS:
            self._result(item, where)
        elif kind in _CALLS:
            self._calls.append(_CALLS[kind](item, where))
        elif kind == "mcp_call":
            self._calls.append(_function_call(item, where))
            self._result({"call_id": item.get("id"), "output": _output_of(item)}, where)
        elif kind == "item_reference":
            raise wrong(where, "refers to an item, but nothing is stored here: send the item itself")
        elif kind not in _HOSTED:
            raise wrong(f"{where}.type", f"is {kind!r}, which this server does not understand")

    def finish(self) -> list[Message]:
        """All messages. The text of a last turn without calls is to be continued and counts to its last blank."""
        self._end_turn(last=True)
        return self._messages

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
        if role is None:
            raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        content = required_content(item, "content", where)
        if role == "assistant":
            if self._texts and not self._calls:
                self._end_turn()
            self._texts.append(content)
        else:
            self._end_turn()
            self._messages.append(Message(role, content))

    def _result(self, item: dict[str, Any], where: str) -> None:
        self._end_turn()
        call_id = _text(item.get("call_id")) or _text(item.get("id"))
        kind, output = item.get("type"), item.get("output")
        if kind == "shell_call_output" and isinstance(output, list):
            content = "\n".join(_shell_output(part, f"{where}.output.{at}") for at, part in enumerate(output))
        elif kind == "apply_patch_call_output":
            content = parse_content(output, f"{where}.output")  # a patch that went well may say nothing
        else:
            content = required_content(item, "output", where)
        if not any(message.role == "assistant" for message in reversed(self._messages)):
            raise uncalled(where)
        self._messages.append(Message("tool", content, tool_call_id=call_id))

    def _end_turn(self, last: bool = False) -> None:
        """Reasoning that led to nothing, as when a client broke off, goes with the turn it belonged to."""
        content = "".join(self._texts)
        if not last or self._calls:
            content = content.strip()
        if self._texts or self._calls:
            reasoning = "\n\n".join(filter(None, self._reasoning)) or None
            self._messages.append(Message("assistant", content, tuple(self._calls), reasoning=reasoning))
        self._reasoning, self._texts, self._calls = [], [], []


def _reasoning(item: dict[str, Any], where: str) -> str:
    """What was thought, whichever way the client sends it back; of another service's it is the summary."""
    for name in ("content", "summary"):
        if not isinstance(item.get(name), list | None):
            raise wrong(f"{where}.{name}", "must be a list")
    told = _thought(item.get("content"), f"{where}.content") or _unsealed(item.get("encrypted_content"))
    return (told or _thought(item.get("summary"), f"{where}.summary")).strip()


def _thought(parts: list[Any] | None, where: str) -> str:
    texts: list[str] = []
    for at, part in enumerate(parts or []):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise wrong(f"{where}.{at}.text", "must be a string")
        texts.append(text)
    return "\n\n".join(texts)


def _function_call(item: dict[str, Any], where: str) -> ToolCall:
    arguments = parse_arguments(item.get("arguments"), f"{where}.arguments")
    return ToolCall(_call_id(item), _name(item, where), arguments)


def _custom_call(item: dict[str, Any], where: str) -> ToolCall:
    if not isinstance(item.get("input"), str):
        raise wrong(f"{where}.input", "must be a string")
    return ToolCall(_call_id(item), _name(item, where), {CUSTOM_FIELD: item["input"]})


def _built_in(name: str, field: str) -> Callable[[dict[str, Any], str], ToolCall]:
    """A call of a tool that has no name of its own, its arguments being the object in `field`."""

    def call(item: dict[str, Any], where: str) -> ToolCall:
        if not isinstance(item.get(field), dict):
            raise wrong(f"{where}.{field}", "must be an object")
        arguments = {key: value for key, value in item[field].items() if value is not None}
        return ToolCall(_call_id(item), name, arguments)

    return call


_CALLS: dict[str, Callable[[dict[str, Any], str], ToolCall]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _built_in("local_shell", "action"),
    "shell_call": _built_in("shell", "action"),
    "apply_patch_call": _built_in("apply_patch", "operation"),
}


def _output_of(service_call: dict[str, Any]) -> object:
    """What a call that a service made has brought: its output, or what went wrong."""
    error = service_call.get("error")
    said = error.get("message") or error.get("content") if isinstance(error, dict) else error
    return service_call.get("output") or said or ""


def _shell_output(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    return "\n".join(text for name in ("stdout", "stderr") if (text := _text(value.get(name))))


def _name(item: dict[str, Any], where: str) -> str:
    if not isinstance(item.get("name"), str) or not item["name"]:
        raise wrong(f"{where}.name", "must be a string")
    return function_name(item["name"], item.get("namespace"))


def _call_id(item: dict[str, Any]) -> str:
    return _text(item.get("call_id")) or _text(item.get("id")) or ""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
