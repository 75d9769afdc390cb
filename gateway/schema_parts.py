"""What schemas are made of: their parts, what these refer to, and which of them go round in a circle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_NAMED = ("properties", "patternProperties")  # objects whose values are schemas
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")

Part = dict[str, Any]


def target(root: Any, reference: Any) -> Any:
    """What a reference within a schema points to; None where nothing is there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for step in reference.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isdecimal() and len(key) < 8 and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def inside(value: Any) -> Iterator[Part]:
    """All objects in a schema, itself included. What is no schema in it does no harm."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part


def circles(root: Part) -> Iterator[list[Part]]:
    """The parts that values of a schema depend on, those that depend on one another together.

    They come behind all others that they depend on. (The algorithm is Tarjan's, without calls that nest.)
    """
    numbers: dict[int, int] = {}  # by id, in the order of coming
    lowest: dict[int, int] = {}
    waiting: list[Part] = []
    grouped: set[int] = set()
    path: list[tuple[Part, Iterator[Part]]] = []

    def enter(part: Part) -> None:
        numbers[id(part)] = lowest[id(part)] = len(numbers)
        waiting.append(part)
        path.append((part, beneath(root, part)))

    enter(root)
    while path:
        part, following = path[-1]
        me = id(part)
        for below in following:
            if id(below) not in numbers:
                enter(below)
                break
            if id(below) not in grouped:
                lowest[me] = min(lowest[me], numbers[id(below)])
        else:
            path.pop()
            if path:
                above = id(path[-1][0])
                lowest[above] = min(lowest[above], lowest[me])
            if lowest[me] == numbers[me]:
                group = [waiting.pop()]
                while group[-1] is not part:
                    group.append(waiting.pop())
                grouped.update(map(id, group))
                yield group


def beneath(root: Part, part: Part) -> Iterator[Part]:
    """The parts that a part has or refers to."""
    found: list[Any] = [target(root, part.get("$ref")), *(part.get(name) for name in _SINGLE)]
    for name in _NAMED:
        if isinstance(named := part.get(name), dict):
            found += named.values()
    for name in _LISTED:
        if isinstance(listed := part.get(name), list):
            found += listed
    return (each for each in found if isinstance(each, dict))
