"""Tools of an Anthropic body: those at the head of the prompt, and those that a message brings in later.

A client with many tools marks most of them `defer_loading` and lets the model search for them. What a search found
stands in its result as `tool_reference`, and what comes and goes otherwise as `tool_addition` and `tool_removal`. All
of these become text where they stand, so that a new tool leaves the head of the prompt, and all behind it, as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gateway.canonical import function_tool, sorted_tools, wrong

_THEIR_SEARCH = "tool_search_tool_"
_LOADING = ("tool_reference", "tool_addition")
_MOST_TEXT = (
    16 << 20
)  # characters of descriptions that messages bring in: a reference takes few, and can be repeated


class Tools:
    """What a body's `tools` says. Parsing its messages adds what they bring in.

    `shown` stands at the head of the prompt; `loaded` may be called because a message describes it.
    """

    def __init__(self, tools: Iterable[dict[str, Any]] = (), deferred: Iterable[dict[str, Any]] = ()) -> None:
        self.shown = tuple(tools)
        self._known = {tool["function"]["name"]: tool for tool in (*self.shown, *deferred)}
        self._loaded: dict[str, dict[str, Any]] = {}
        self._room = _MOST_TEXT

    @property
    def loaded(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._loaded.values())

    def told(self, content: object, where: str) -> object:
        """Content whose blocks about tools are text. Raises `RequestError` for a tool that is not described."""
        if not isinstance(content, list):
            return content
        kinds = ["", *(block.get("type") if isinstance(block, dict) else None for block in content), ""]
        texts: list[object] = []
        for at, block in enumerate(content):
            before, kind, after = kinds[at : at + 3]
            if kind == "tool_removal":
                name = _name(block.get("tool"), f"{where}.{at}.tool")
                texts.append(_text(f"The tool {name} is no longer available."))
            elif kind in _LOADING:
                line = self._definition(block, f"{where}.{at}")
                first, last = before not in _LOADING, after not in _LOADING
                texts.append(_text("<functions>\n" * first + line + "\n</functions>" * last))
            else:
                texts.append(block)
        return texts

    def _definition(self, block: dict[str, Any], where: str) -> str:
        """The tool of a block on one line, as clients tell the model that it will see it."""
        given = block if block["type"] == "tool_reference" else block.get("tool")
        where = where if given is block else f"{where}.tool"
        if isinstance(given, dict) and given.get("type") == "tool_definition":
            found = list(_tool(given.get("definition"), f"{where}.definition"))
            tool = found[0] if found else None
        else:
            name = _name(given, where)
            tool = self._known.get(name)
        if tool is None:
            raise wrong(where, "is no tool that this request describes")
        function = tool["function"]
        self._known[function["name"]] = self._loaded[function["name"]] = tool
        line = {key: function[key] for key in ("description", "name", "parameters")}
        text = f"<function>{json.dumps(line, ensure_ascii=False)}</function>"
        self._room -= len(text)
        if self._room < 0:
            raise wrong(where, f"brings in descriptions of more than {_MOST_TEXT} characters in all")
        return text


def brings_tools(content: object) -> bool:
    """Whether a list of blocks has one that stands for tools."""
    return isinstance(content, list) and any(isinstance(b, dict) and b.get("type") in _LOADING for b in content)


def parse_tools(value: object, *, in_order: bool = False) -> Tools:
    """Tools that the client describes itself; those that Anthropic defines or runs are left out.

    Where the model should find deferred ones by a search that only Anthropic runs, all are shown. `in_order` sorts
    tools by name and the keys of their schemas. Raises `RequestError`.
    """
    if value is None:
        return Tools()
    if not isinstance(value, list):
        raise wrong("tools", "must be a list")
    shown: list[dict[str, Any]] = []
    deferred: list[dict[str, Any]] = []
    searched = any(isinstance(item, dict) and str(item.get("type")).startswith(_THEIR_SEARCH) for item in value)
    for at, item in enumerate(value):
        later = not searched and isinstance(item, dict) and item.get("defer_loading") is True
        (deferred if later else shown).extend(_tool(item, f"tools.{at}"))
    return Tools(*(sorted_tools(shown), sorted_tools(deferred)) if in_order else (shown, deferred))


def _tool(value: object, where: str) -> Iterable[dict[str, Any]]:
    """One tool, or none where it is Anthropic's own."""
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    if (value.get("type") or "custom") != "custom":
        return
    schema = value.get("input_schema")
    if not isinstance(schema, dict):
        raise wrong(f"{where}.input_schema", "must be an object")
    yield function_tool(
        {"name": value.get("name"), "description": value.get("description"), "parameters": schema}, where
    )


def _name(value: object, where: str) -> str:
    """Blocks that change tools and those in results do not call the name the same."""
    name = (value.get("tool_name") or value.get("name")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise wrong(where, "must name a tool")
    return name


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
