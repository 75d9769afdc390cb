"""Tools whose input is free text: to a model each is a function of one text, in either OpenAI API."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.body import mended

CUSTOM_FIELD = "input"  # the one argument of a function that stands for a free-form tool
_BEGUN = re.compile(rf'\s*\{{\s*"{CUSTOM_FIELD}"\s*:\s*"')
_ESCAPE = 6  # characters, the longest


def custom_function(tool: dict[str, Any]) -> dict[str, Any]:
    """The function that stands for a free-form tool. If its text follows a grammar, the model is told in words."""
    description = tool.get("description") or ""
    form = tool.get("format")
    form = form.get("grammar", form) if isinstance(form, dict) else None  # chats have an object more
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        description = f"{description}\n\n`{CUSTOM_FIELD}` follows this {form.get('syntax')} grammar:\n"
        description = (description + form["definition"]).lstrip()
    parameters = {
        "type": "object",
        "properties": {CUSTOM_FIELD: {"type": "string"}},
        "required": [CUSTOM_FIELD],
    }
    return {"name": tool.get("name"), "description": description, "parameters": parameters}


def custom_input(value: object, arguments: str) -> str:
    """The text that a call of such a function gives its tool, as far as it came where it was cut off.

    That is all of the arguments where they are something else.
    """
    given = value.get(CUSTOM_FIELD) if isinstance(value, dict) else None
    if isinstance(given, str):
        return given
    begun = _BEGUN.match(arguments)
    if begun is None:
        return arguments
    for end in range(len(arguments), max(len(arguments) - _ESCAPE, begun.end() - 1), -1):
        try:
            return str(mended(json.loads(f'"{arguments[begun.end() : end]}"')))
        except ValueError:  # it ends within an escape, or with its quote
            continue
    return arguments


def custom_names(tools: object) -> frozenset[str]:
    """The names of the free-form tools in a chat's list."""
    found = (tool.get("custom") for tool in tools if _is_custom(tool)) if isinstance(tools, list) else ()
    return frozenset(
        each["name"] for each in found if isinstance(each, dict) and isinstance(each.get("name"), str)
    )


def _is_custom(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom"
