"""System text and messages of an Anthropic body, in the canonical form that equal conversations share.

One message may hold several of ours: results of tools and the user's text, in the order they came. Left out are
citations and signatures, thinking that only its maker can read, what tools of Anthropic's own
servers did, and `is_error`, since a result's text says what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from gateway import anthropic_documents
from gateway.anthropic_tools import Tools, brings_tools
from gateway.canonical import parse_arguments, parse_content, uncalled, without_billing_header, wrong
from gateway.conversation import Message, ToolCall
from gateway.hints import mark_seconds

_ROLES = ("user", "assistant", "system")
_UNREADABLE = {
    *("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback")
}


Through = Callable[
    [list[Any], Callable[[int], tuple[Message, ...]], Callable[[Any], bool]], tuple[tuple[Message, ...], ...]
]


def parse_messages(
    system: object,
    value: object,
    tools: Tools | None = None,
    *,
    drop_billing_header: bool = True,
    through: Through | None = None,
) -> tuple[Message, ...]:
    """`tools` learns which of them the messages bring in. Raises `RequestError` naming the field that is wrong.

    `through` has each item parsed that is not known from before (`SaidBefore.parsed`).
    """
    tools = tools or Tools()
    if not isinstance(value, list):
        raise wrong("messages", "must be a list")
    if not value:
        raise wrong("messages", "must not be empty")
    last = len(value) - 1

    def parse(at: int) -> tuple[Message, ...]:
        return tuple(_message(value[at], f"messages.{at}", tools, last=at == last))

    said = through(value, parse, stands_alone) if through else tuple(map(parse, range(len(value))))
    for at, parts in enumerate(said):
        if any(part.role == "tool" for part in parts):
            raise uncalled(f"messages.{at}")
        if any(part.role == "assistant" for part in parts):
            break
    messages = tuple(chain.from_iterable(said))
    text = parse_content(system, "system")
    if drop_billing_header:
        text = without_billing_header(text)
    head = Message("system", text, mark_seconds=mark_seconds(system))
    return (head, *messages) if text else messages


def stands_alone(item: Any) -> bool:
    """Whether what an item says is in it alone, and not in the request's tools as well."""
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, list):
        return True
    inner = (block.get("content") for block in content if isinstance(block, dict))
    return not any(brings_tools(each) for each in (content, *inner))


def _message(value: object, where: str, tools: Tools, last: bool) -> Iterator[Message]:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    blocks = _blocks(content, f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, last)
    elif role == "user":
        yield from _user(blocks, tools)
    else:
        text = parse_content(tools.told(content, f"{where}.content"), f"{where}.content")
        yield Message("system", text, mark_seconds=mark_seconds(content))


def _blocks(content: object, where: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a message, each with its place."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of blocks")
    blocks = [(block, f"{where}.{at}") for at, block in enumerate(content)]
    for block, here in blocks:
        if not isinstance(block, dict):
            raise wrong(here, "must be an object")
        if not isinstance(block.get("type"), str):
            raise wrong(f"{here}.type", "must be a string")
    return blocks


def _user(blocks: list[tuple[dict[str, Any], str]], tools: Tools) -> Iterator[Message]:
    """Each run of text and documents is one message, and so is each result."""
    if not blocks:
        yield Message("user", "")
    run: list[str] = []
    mark = 0  # of the run
    for block, where in blocks:
        if block["type"] in ("text", *anthropic_documents.KINDS):
            is_text = block["type"] == "text"
            run.append(_string(block, "text", where) if is_text else anthropic_documents.text(block, where))
            mark = max(mark, mark_seconds(block))
            continue
        if block["type"] != "tool_result":
            raise _unknown(block, where)
        if run:
            yield Message("user", "\n".join(run), mark_seconds=mark)
            run, mark = [], 0
        called = _string(block, "tool_use_id", where)
        content = anthropic_documents.told(
            tools.told(block.get("content"), f"{where}.content"), f"{where}.content"
        )
        result = parse_content(content, f"{where}.content")
        marked = mark_seconds(block, block.get("content"))
        yield Message("tool", result, tool_call_id=called, mark_seconds=marked)
    if run:
        yield Message("user", "\n".join(run), mark_seconds=mark)


def _assistant(blocks: list[tuple[dict[str, Any], str]], last: bool) -> Message:
    """Neighbours of one kind are lines; what stood apart was one text before a dialect divided it."""
    said: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[ToolCall] = []
    before = ""
    for block, where in blocks:
        kind = block["type"]
        if kind in said:
            said[kind].append(("\n" if kind == before else "") + _string(block, kind, where))
        elif kind == "tool_use":
            arguments = parse_arguments(block.get("input"), f"{where}.input")
            calls.append(ToolCall(_string(block, "id", where), _string(block, "name", where), arguments))
        elif kind not in _UNREADABLE and not kind.endswith("_tool_result"):
            raise _unknown(block, where)
        before = kind
    content = "".join(said["text"])
    if not last or calls:
        content = content.strip()  # the text of a turn to be continued counts to its last blank
    reasoning = "".join(said["thinking"]).strip() or None
    marked = mark_seconds(*(block for block, _ in blocks))
    return Message("assistant", content, tuple(calls), reasoning=reasoning, mark_seconds=marked)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value


def _unknown(block: dict[str, Any], where: str) -> Exception:
    return wrong(where, f"has type {block['type']!r}, which this model does not take here")
