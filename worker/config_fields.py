"""Typed access to the fields of a config, with errors that name the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from worker.model_error import ModelError

DEFAULT_ROPE_THETA = 10_000.0  # what transformers fills in where a config has none


class Fields:
    """Typed access to a config's fields; null counts as absent."""

    def __init__(self, fields: Mapping[str, Any], prefix: str = "") -> None:
        self._fields = fields
        self._prefix = prefix

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def text(self, name: str) -> str:
        return cast("str", self._typed(name, str, "a string", None))

    def flag(self, name: str, default: bool = False) -> bool:
        return cast("bool", self._typed(name, bool, "true or false", default))

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = cast("int", self._typed(name, int, "an integer", default))
        if value <= 0:
            raise ModelError(f"{self._prefix}{name}: {value} is not positive")
        return value

    def count(self, name: str) -> int:
        """An integer that is not negative; 0 where the field is absent."""
        value = cast("int", self._typed(name, int, "an integer", 0))
        if value < 0:
            raise ModelError(f"{self._prefix}{name}: {value} is negative")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = float(self._typed(name, (int, float), "a number", default))
        if not 0 < value < float("inf"):
            raise ModelError(f"{self._prefix}{name}: {value} is not positive")
        return value

    def section(self, name: str) -> Fields:
        """The fields of a nested object; empty where there is none."""
        return Fields(self._typed(name, Mapping, "an object", {}), f"{self._prefix}{name}.")

    def _typed(self, name: str, kind: Any, words: str, default: object) -> Any:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{name}: missing")
        # bool is an int to Python and never to a config.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self._prefix}{name}: {value!r} is not {words}")
        return value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings, or None where the field is absent."""
        value = self._typed(name, list, "a list of strings", []) or None
        if value is not None and not all(isinstance(item, str) for item in value):
            raise ModelError(f"{self._prefix}{name}: {value!r} is not a list of strings")
        return cast("list[str] | None", value)

    def error(self, name: str, what: str) -> ModelError:
        """The error that refuses field `name`, under its full name."""
        return ModelError(f"{self._prefix}{name}: {what}")
