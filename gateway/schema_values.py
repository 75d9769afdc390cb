"""Schemas that refer to themselves: which of their parts have a value that ends, and what is left without the others.

The library that follows schemas takes a part without any for one that can be begun: an answer would break off in it,
or never come to its end. And it follows references by calls that nest: where they lead too far, the process dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.schema_parts import Part, beneath, circles, inside, target

MAX_DEPTH = 500  # parts one beneath the other; from some 1,000 on the library runs out of stack
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_NONE: frozenset[str] = frozenset()


class Endless(Exception):
    """A schema without a value, or one whose references lead too far; the message says which."""


def ending(schema: Part) -> Part:
    """A schema with `false` for each part that no value fits because values would have no end.

    Parts that no value fits for other reasons may stay. Raises `Endless`.
    """
    if not any("$ref" in part for part in inside(schema)):
        return schema
    values = _Values(schema)
    if not values.types(schema):
        raise Endless("it has no value that ends")
    empty = values.empty()
    return _without(schema, empty) if empty else schema


class _Values:
    """By each part of a schema the types that its values may have: the least that is consistent.

    Every type is taken for possible in what is not understood here.
    """

    def __init__(self, root: Part) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}
        self._depths: dict[int, int] = {}
        for group in circles(root):
            self._measure(group)
            self._types |= dict.fromkeys(map(id, group), _NONE)
            while any([self._grows(part) for part in group]):
                pass

    def types(self, part: Any) -> frozenset[str]:
        if part is False:
            return _NONE
        return self._types.get(id(part), _TYPES) if isinstance(part, dict) else _TYPES

    def empty(self) -> frozenset[int]:
        """The ids of the parts that no value fits."""
        return frozenset(part for part, types in self._types.items() if not types)

    def _measure(self, group: Sequence[Part]) -> None:
        """How many parts there may be on the way down; in a circle it may lead through all."""
        below = (self._depths.get(id(each), 0) for part in group for each in beneath(self._root, part))
        depth = len(group) + max(below, default=0)
        if depth > MAX_DEPTH:
            raise Endless(f"its references lead down more than {MAX_DEPTH} levels")
        self._depths |= dict.fromkeys(map(id, group), depth)

    def _grows(self, part: Part) -> bool:
        """Whether more types are found than before."""
        found = self._possible(part)
        grows = found != self._types[id(part)]
        self._types[id(part)] = found
        return grows

    def _possible(self, part: Part) -> frozenset[str]:
        kinds = part.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        named = frozenset("number" if kind == "integer" else kind for kind in listed if isinstance(kind, str))
        types = named or _TYPES
        if "const" not in part and "enum" not in part:
            if "object" in types and not self._has_object(part):
                types -= {"object"}
            if "array" in types and not self._has_array(part):
                types -= {"array"}
        if "$ref" in part:
            types &= self.types(target(self._root, part["$ref"]))
        for name in ("allOf", "anyOf", "oneOf"):
            branches = part.get(name)
            if isinstance(branches, list) and branches:
                found = [self.types(branch) for branch in branches]
                types &= frozenset.intersection(*found) if name == "allOf" else frozenset.union(*found)
        return types

    def _has_object(self, part: Part) -> bool:
        named, required, least = part.get("properties"), part.get("required"), part.get("minProperties")
        named = named if isinstance(named, dict) else {}
        patterns = part.get("patternProperties")
        others = [
            part.get("additionalProperties", True),
            *(patterns.values() if isinstance(patterns, dict) else ()),
        ]
        another = any(map(self.types, others))
        for key in required if isinstance(required, list) else ():
            if not (self.types(named[key]) if isinstance(key, str) and key in named else another):
                return False
        if another or not isinstance(least, int):
            return True
        return sum(1 for each in named.values() if self.types(each)) >= least

    def _has_array(self, part: Part) -> bool:
        items, first, least = part.get("items", True), part.get("prefixItems"), part.get("minItems")
        if isinstance(items, list):  # as it was written before
            first, items = items, part.get("additionalItems", True)
        first = first if isinstance(first, list) else []
        if not isinstance(least, int) or least <= 0:
            return True
        return all(map(self.types, first[:least])) and (least <= len(first) or bool(self.types(items)))


def _without(value: Any, empty: frozenset[int]) -> Any:
    if isinstance(value, dict):
        return {key: False if id(below) in empty else _without(below, empty) for key, below in value.items()}
    if isinstance(value, list):
        return [False if id(below) in empty else _without(below, empty) for below in value]
    return value
