"""Reads the key-value section of a GGUF file and nothing behind it.

The `gguf` package builds numpy views of every field and takes seconds for a vocabulary; the gateway has to start
in well under one. Layout: magic, version, tensor count, pair count, then pairs of key, type and value, all in
little-endian order.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

from protocol.errors import SettingsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, Struct] = {
    code: Struct("<" + letter)
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = Struct("<I"), Struct("<Q")


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The values of the wanted keys; arrays become lists. Raises `SettingsError` for a file that is no GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).pairs(wanted)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise SettingsError(f"model: cannot read {path} as GGUF: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not start with the letters GGUF")
        self._at = 4
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        self._number(_U64)  # tensors
        found: dict[str, Any] = {}
        for _ in range(self._number(_U64)):
            key = self._text()
            kind = self._number(_U32)
            value = self._value(kind)
            if wanted(key):
                found[key] = value
        return found

    def _number(self, layout: Struct) -> Any:
        if self._at + layout.size > len(self._data):
            raise ValueError("the file is cut short")
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _text(self) -> str:
        size = self._number(_U64)
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("the file is cut short")
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        item, count = self._number(_U32), self._number(_U64)
        if item == _STRING:
            return self._texts(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        layout = Struct(f"<{count}{_SCALARS[item].format[1:]}")
        if self._at + layout.size > len(self._data):
            raise ValueError("the file is cut short")
        values = list(layout.unpack_from(self._data, self._at))
        self._at += layout.size
        return values

    def _texts(self, count: int) -> list[str]:
        """Many short strings: the loop that start-up time is spent in."""
        data, at, size_of = self._data, self._at, _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                at += 8
                end = at + size_of(data, at - 8)[0]
                texts.append(data[at:end].decode("utf-8", errors="replace"))
                at = end
        except StructError as error:
            raise ValueError("the file is cut short") from error
        if at > len(data):
            raise ValueError("the file is cut short")
        self._at = at
        return texts
