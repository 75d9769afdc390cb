"""Schemas that would take minutes to compile are turned away unseen: the limits are far beyond what tools have.

The library that follows schemas has limits of its own, but not for these: its time grows with the square of the
properties of an object, the cube of their patterns, exponentially with patterns that hold together, and for multiples
with the number itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from gateway.schema_parts import inside, target

MAX_PROPERTIES = 1000  # of one object
MAX_ALL_PROPERTIES = 10_000
MAX_PATTERN_PROPERTIES = 64  # of all objects
MAX_JOINT_PATTERNS = 12  # that `allOf` wants of one text
MAX_MULTIPLES = 20_000  # the sum of all numbers of which values should be multiples
_MOST_PARTS = 1000  # of one `allOf`


def too_costly(schemas: Iterable[Any]) -> str | None:
    """Why schemas would take too long together, or None."""
    properties = patterns = multiples = 0
    for schema in schemas:
        for part in inside(schema):
            own = part.get("properties")
            count = len(own) if isinstance(own, dict) else 0
            properties += count
            if max(count, properties - MAX_ALL_PROPERTIES + MAX_PROPERTIES) > MAX_PROPERTIES:
                return f"more than {MAX_PROPERTIES} properties in one object, or {MAX_ALL_PROPERTIES} in all"
            own = part.get("patternProperties")
            patterns += len(own) if isinstance(own, dict) else 0
            if patterns > MAX_PATTERN_PROPERTIES:
                return f"more than {MAX_PATTERN_PROPERTIES} patternProperties"
            joint, multiple = _joint(part, schema) if "allOf" in part else (0, _multiple(part))
            multiples += multiple
            if multiples > MAX_MULTIPLES:
                return f"multipleOf of more than {MAX_MULTIPLES} in all"
            if joint > MAX_JOINT_PATTERNS:
                return f"allOf of more than {MAX_JOINT_PATTERNS} patterns"
    return None


def _joint(schema: dict[str, Any], root: Any) -> tuple[int, int]:
    """How many patterns one value should follow, and a number of which it should be a multiple."""
    left, seen = [schema], set[int]()
    patterns, multiple = 0, 1
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        patterns += "pattern" in part
        multiple = min(multiple * max(_multiple(part), 1), MAX_MULTIPLES + 1)
        if len(seen) > _MOST_PARTS:
            return MAX_JOINT_PATTERNS + 1, multiple
        every = part.get("allOf")
        meant = target(root, part.get("$ref"))
        left += [each for each in (*(every if isinstance(every, list) else ()), meant) if isinstance(each, dict)]
    return patterns, multiple


def _multiple(schema: dict[str, Any]) -> int:
    """The digits of `multipleOf`, wherever its point is: so many states it takes."""
    number = schema.get("multipleOf")
    if not isinstance(number, int | float) or isinstance(number, bool):
        return 0
    digits = Decimal(str(number)).normalize().as_tuple().digits
    return min(int("".join(map(str, digits[:9]))), MAX_MULTIPLES + 1)
