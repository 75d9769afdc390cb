"""The header of a GGUF file and its mapped tensor data.

The reader of the `gguf` package makes an array object for every token of the vocabulary, which takes seconds; this
one steps over arrays, which the worker has no use for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from worker.model_error import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Struct formats of the scalar value types, by their number in the file.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Stands in the metadata for an array, whose items are not read."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: bytes [start, end) of the file. `shape` has the fastest dimension last, as in torch."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    end: int


class GgufFile:
    """A mapped file: `metadata` by key, `tensors` by name in the file's order, `data_start` where the header ends.

    The mapping is private and writable so that torch takes views of it without complaint; nobody writes to it. It
    goes with the last view.
    Raises `ModelError` for a file that is not GGUF, is cut short, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{path}: empty file") from error
        try:
            self._read_header()
        except (struct.error, OverflowError, UnicodeDecodeError, _CutShort) as error:
            raise ModelError(f"{path}: header is cut short or damaged") from error

    def _read_header(self) -> None:
        if self.map[:4] != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file")
        cursor = _Cursor(self.map, 4)
        version = cursor.scalar("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not one of {_VERSIONS}")
        tensor_count, field_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("<I"))
        self.metadata: Mapping[str, Any] = metadata

        entries = [self._tensor_entry(cursor) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelError(f"{self.path}: general.alignment {alignment!r} is not a positive integer")
        self.data_start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset, size in entries:
            start = self.data_start + offset
            if start + size > len(self.map):
                raise ModelError(f"{self.path}: {name} ends past the end of the file: is it cut short?")
            if name in tensors:
                raise ModelError(f"{self.path}: {name} stands there twice")
            tensors[name] = GgufTensor(name, kind, shape, start, start + size)
        self.tensors: Mapping[str, GgufTensor] = tensors

    def _tensor_entry(self, cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
        """Name, type, shape, offset into the data and size in bytes."""
        name = cursor.string()
        dimensions = cursor.scalar("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise _CutShort
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
        number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.path}: {name} has an unknown type, number {number}") from error
        if shape and shape[-1] % block:
            raise ModelError(f"{self.path}: {name}: rows of {shape[-1]} are no whole blocks of {kind.name}")
        return name, kind, shape, offset, prod(shape) // block * block_bytes


class _CutShort(Exception):
    """The header runs past the end of the file."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self._data):
            raise _CutShort
        return self._data[start : self.offset].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._skip_array()
        layout = _SCALARS.get(kind)
        if layout is None:
            raise _CutShort
        return self.scalar(layout)

    def _skip_array(self) -> GgufArray:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            data, offset, length_at = self._data, self.offset, struct.Struct("<Q").unpack_from
            for _ in range(count):
                offset += 8 + length_at(data, offset)[0]
            self.offset = offset
        elif kind in _SCALARS:
            self.offset += count * struct.calcsize(_SCALARS[kind])
        else:
            raise _CutShort  # nested arrays, which nobody writes
        return GgufArray(count)
