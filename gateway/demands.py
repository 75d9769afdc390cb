"""The fields with which clients ask for JSON of a schema or for a call, as the form that an answer must have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.grammar import Demand
from gateway.responses_tools import function_name
from protocol.errors import RequestError


class NamedSchema(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(frozen=True, strict=True)

    wanted: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def demand(self, field: str) -> Demand | None:
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError(f"{field}.json_schema: Field required", param=f"{field}.json_schema")
        return json_demand(self.type, self.json_schema.wanted if self.json_schema else None, field)


def json_demand(kind: str, schema: dict[str, Any] | None, field: str) -> Demand | None:
    """What a format asks for; a schema left out is that of any object."""
    if kind == "text":
        return None
    return Demand(field, {"type": "object"} if kind == "json_object" or schema is None else schema)


def free_demand(tools: object) -> Demand | None:
    """What strict tools ask for where nothing need be called."""
    strict = strict_tools(tools)
    return Demand("tools", strict=strict, free=True) if strict else None


def strict_tools(tools: object, namespace: object = None) -> frozenset[str]:
    """The names of tools that want to be called exactly as their schemas say, in any dialect's list."""
    found: set[str] = set()
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(name := inner.get("name"), str):
            continue
        if inner.get("type") == "namespace":
            found |= strict_tools(inner.get("tools"), name)
        elif inner.get("strict") is True:
            found.add(function_name(name, namespace))
    return frozenset(found)
