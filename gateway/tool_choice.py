"""`tool_choice` of both OpenAI APIs: which tools may be called, and whether one must be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.canonical import wrong
from gateway.demands import free_demand, strict_tools
from gateway.grammar import Demand
from gateway.responses_tools import function_name

FIELD = "tool_choice"
_MODES = ("auto", "required")


class ToolChoice(NamedTuple):
    """A choice as it is understood. `allowed` are the only functions that may be called; None: all may.

    The prompt shows all tools in any case: it stays the same, whatever may be called this time.
    """

    calls: bool = True
    must: bool = False
    name: str | None = None
    allowed: frozenset[str] | None = None

    def demand(self, tools: object, form: Demand | None) -> Demand | None:
        """What form the answer must have; `form` is that of one without calls, where it must have any."""
        if self.must:
            return Demand(FIELD, tool=self.name, strict=strict_tools(tools))
        if form is not None or not self.calls:
            return form
        if self.allowed is not None:
            return Demand(FIELD, strict=strict_tools(tools), free=True, only=True)
        return free_demand(tools)


def tool_choice(choice: str | dict[str, Any] | None, tools: object) -> ToolChoice:
    """Raises `RequestError` for what is not known, and for tools that `tools` does not hold."""
    if choice in (None, "auto", "none"):
        return ToolChoice(calls=choice != "none")
    if choice == "required":
        return ToolChoice(must=True)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "allowed_tools":
        return _allowed(choice, tools)
    inner = choice.get(kind, choice) if isinstance(choice, dict) and kind in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise wrong(FIELD, "can only be auto, none, required, allowed_tools or a function here")
    return ToolChoice(must=True, name=name)


def _allowed(choice: dict[str, Any], tools: object) -> ToolChoice:
    """Chat completions have mode and tools in an object of their own, responses beside the type."""
    where = f"{FIELD}.allowed_tools" if "allowed_tools" in choice else FIELD
    inner = choice.get("allowed_tools", choice)
    if not isinstance(inner, dict):
        raise wrong(where, "must be an object")
    mode, named = inner.get("mode"), inner.get("tools")
    if mode not in _MODES:
        raise wrong(f"{where}.mode", f"must be one of {', '.join(_MODES)}")
    if not isinstance(named, list):
        raise wrong(f"{where}.tools", "must be a list of tools")
    offered = dict(_offered(tools))
    allowed: set[str] = set()
    for at, entry in enumerate(named):
        meant = next((label for label in _labels(entry) if label in offered), None)
        if meant is None:
            raise wrong(f"{where}.tools.{at}", "is none of the request's tools")
        allowed |= offered[meant]
    return ToolChoice(
        calls=bool(allowed) or mode == "required", must=mode == "required", allowed=frozenset(allowed)
    )


_Label = tuple[str, str]


def _offered(tools: object, namespace: object = None) -> Iterator[tuple[_Label, frozenset[str]]]:
    """What each tool may be called in a choice, with the functions that it stands for: none if a service runs it."""
    for tool in tools if isinstance(tools, list) else ():
        for kind, name in _labels(tool):
            if kind == "namespace":
                inner = list(_offered(tool.get("tools"), name))
                yield from inner
                yield (kind, name), frozenset().union(*(functions for _, functions in inner))
            elif kind in ("function", "custom"):
                whole = function_name(name, namespace)
                yield (kind, whole), frozenset({whole})
            else:
                yield (kind, name), frozenset()


def _labels(tool: Any) -> Iterator[_Label]:
    """A tool's type with what tells it from others of its type."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return
    if kind in ("function", "custom", "namespace"):
        inner = tool.get(kind, tool)
        name = inner.get("name") if isinstance(inner, dict) else None
        if isinstance(name, str):
            yield kind, function_name(name, inner.get("namespace"))
    else:
        label = tool.get("server_label")
        yield kind, label if isinstance(label, str) else ""
