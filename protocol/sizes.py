"""Byte sizes as people write and read them: `2GiB`, `512MiB`, `64KiB`, or plain bytes."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(value: object) -> object:
    """Text such as `1.5GiB` as bytes; anything that is not text is passed on. Raises `ValueError` for nonsense."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number of bytes or a number with a unit, such as 2GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest binary unit that it fills, with at most one decimal."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _UNITS[unit.lower()]:
            return f"{size_bytes / _UNITS[unit.lower()]:.1f}".removesuffix(".0") + unit
    return f"{size_bytes}B"
