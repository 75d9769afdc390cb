"""Tools of a Responses body as functions, and the way back from a call of such a function to the client's item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from gateway.canonical import function_tool, sorted_tools, wrong
from gateway.custom_tools import custom_function


class Offered(NamedTuple):
    """What a function stands for: the client's own name of it, and whether its input is free text."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Tools(NamedTuple):
    """Functions for the template, what each name stands for, and the tools as the response repeats them."""

    functions: tuple[dict[str, Any], ...] = ()
    offered: Mapping[str, Offered] = {}
    echoed: tuple[dict[str, Any], ...] = ()


def function_name(name: str, namespace: object) -> str:
    """The name under which a tool of a namespace is offered and its calls are written."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def parse_tools(value: object, *, in_order: bool = False) -> Tools:
    """Functions, free-form tools and namespaces of both; tools that only a hosting service can run are left out.

    `in_order` sorts as for chat completions. Raises `RequestError` naming the field that is wrong.
    """
    if value is None:
        return Tools()
    if not isinstance(value, list):
        raise wrong("tools", "must be a list")
    functions: list[dict[str, Any]] = []
    offered: dict[str, Offered] = {}
    for at, item in enumerate(value):
        for function, meant in _tool(item, f"tools.{at}"):
            functions.append(function)
            offered.setdefault(function["function"]["name"], meant)
    echoed = tuple(_echo(item) for item in value)
    return Tools(sorted_tools(functions) if in_order else tuple(functions), offered, echoed)


def _tool(value: object, where: str, namespace: str | None = None) -> Iterator[tuple[dict[str, Any], Offered]]:
    if not isinstance(value, dict):
        raise wrong(where, "must be an object")
    kind = value.get("type", "function")
    if kind == "namespace" and namespace is None:
        if not isinstance(value.get("name"), str) or not value["name"]:
            raise wrong(f"{where}.name", "must be a string")
        if not isinstance(value.get("tools"), list):
            raise wrong(f"{where}.tools", "must be a list")
        for at, item in enumerate(value["tools"]):
            yield from _tool(item, f"{where}.tools.{at}", value["name"])
    elif kind == "function" or kind == "custom":
        function = function_tool(value if kind == "function" else custom_function(value), where)
        name = function["function"]["name"]
        function["function"]["name"] = function_name(name, namespace)
        yield function, Offered(kind, name, namespace)


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    """The API's answer names these fields of a function even where the request left them out."""
    if tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "parameters": None, "strict": None} | tool
