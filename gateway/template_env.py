"""The Jinja environment that real chat templates expect, in its immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template itself called `raise_exception`: the conversation is one it does not take."""


class GenerationTag(Extension):
    """`{% generation %}` marks training targets; its body is rendered as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a short way to a dict's fields, which templates read by the thousand."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # A field is never unsafe; only names that dicts have themselves need the sandbox's judgement.
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


_DICT_NAMES = frozenset(dir(dict))


def build_environment() -> ImmutableSandboxedEnvironment:
    """An environment with the extensions, filters and globals that templates of released models use."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[object]:
    """Filters such as `map` give iterators."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
