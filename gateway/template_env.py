"""The Jinja environment that real chat templates expect, in its immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.conversation import JsonObject, text_of


class TemplateRefusal(TemplateError):
    """The template itself called `raise_exception`: the conversation is one it does not take."""


class TemplateTooSlow(RuntimeError):
    """A render took longer than any real conversation needs."""


class GenerationTag(Extension):
    """`{% generation %}` marks training targets; its body is rendered as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a short way to what templates read by the thousand: fields of dicts and of
    namespaces, loops, methods of text.

    Nothing that the sandbox refuses or wraps goes this way: no private names, and no `format`, which it gives out
    as a function of its own. Products and powers are refused where one of them alone would take for ever.
    """

    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict or kind is JsonObject:
            if attribute not in _DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif kind is Namespace:
            if attribute[:1] != "_":
                try:
                    return getattr(obj, attribute)
                except AttributeError:
                    return self.undefined(obj=obj, name=attribute)
        elif (kind is str and attribute in _STR_METHODS) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_loop_vars", None)  # what compiled templates add, for functions that take a context
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= _MAX_BASE and abs(right) <= _MAX_EXPONENT):
            raise TemplateRefusal("a power is out of bounds")
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and len(repeated) * times > _MAX_REPEATED:
                    raise TemplateRefusal("a product is out of bounds")
        return super().call_binop(context, operator, left, right)


_MAX_BASE, _MAX_EXPONENT = 1 << 32, 256
_MAX_REPEATED = 1 << 20  # characters or items
_DICT_NAMES = frozenset(dir(dict))
_STR_METHODS = frozenset(
    ("startswith", "endswith", "split", "rsplit", "strip", "lstrip", "rstrip", "replace", "find", "lower", "upper")
)
_LOOP_NAMES = frozenset(("first", "last", "index", "index0"))


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
    layout = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}

    def write() -> str:
        return json.dumps(value, **layout, default=_listed)  # type: ignore[arg-type]

    return text_of(value, str(layout), write) if type(value) is JsonObject else write()


def _listed(value: object) -> list[object]:
    """Filters such as `map` give iterators."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
