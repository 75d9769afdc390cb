"""One file of the disk tier: one part of one boundary, as safetensors, and everything it is bound to.

What is read is trusted only as far as it has been proved. The header is sealed with a hash over itself and the ids,
and holds a CRC-32 of each tensor. Whatever is wrong with a file is a `BadFile`, and no other error comes out of here.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import orjson
import torch
from torch import Tensor

from protocol.digest import DIGEST_BYTES
from protocol.messages import Boundary, BoundaryKind
from worker.snapshot_index import boundary_name

FORMAT = "prefixd-part-1"
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 1 << 20
_MOST_DIMENSIONS = 8
_METADATA = "__metadata__"
_SUM = "crc32."
_IDS = "ids"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

PartKind = Literal["kv", "state"]
BadCause = Literal["checksum", "fingerprint", "unreadable"]
Tensors = dict[str, Tensor]


class BadFile(Exception):
    """A file that cannot be used, and why."""

    def __init__(self, cause: BadCause, text: str) -> None:
        super().__init__(text)
        self.cause: BadCause = cause


class Identity(NamedTuple):
    """What the bits of a state depend on: the model with its tokenizer and types, and how they were computed."""

    fingerprint: str
    numerics: str


@dataclass(frozen=True, slots=True)
class Label:
    """Whose part it is: that of `boundary`, which extends the one named `parent` (empty: none) at `start`.

    `ids` are those of [start, boundary.end) as bytes of int32.
    """

    kind: PartKind
    tenant: str
    parent: bytes
    start: int
    boundary: Boundary
    ids: bytes


class Found(NamedTuple):
    """A file whose header is in order. `seal` stands for all of it."""

    label: Label
    identity: Identity
    seal: str
    size: int


def file_name(tenant: str, digest: bytes, kind: PartKind) -> str:
    return f"{boundary_name(tenant, digest)}.{kind}{SUFFIX}"


def part_size(label: Label, identity: Identity, tensors: Tensors) -> int:
    """Bytes of the file that `write_file` makes. Reads no tensor."""
    header = _header(label, identity, tensors, dict.fromkeys(tensors, 0))
    _, text = _sealed(header, label.ids)
    return _LENGTH_BYTES + len(text) + len(label.ids) + sum(tensor.nbytes for tensor in tensors.values())


def write_file(path: Path, label: Label, identity: Identity, tensors: Tensors) -> str:
    """Put a file there, whole or not at all, and return its seal. Raises `OSError`. Nobody else may read it."""
    sums = {name: zlib.crc32(_bytes_of(tensor)) for name, tensor in tensors.items()}
    seal, text = _sealed(_header(label, identity, tensors, sums), label.ids)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb", opener=_private) as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            for tensor in tensors.values():
                file.write(_bytes_of(tensor))
            file.write(label.ids)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return seal


def read_header(path: Path) -> Found:
    """What a file says it is. Raises `BadFile`."""
    with _opened(path) as file:
        return file.found


def read_tensors(path: Path, seal: str, expected: Tensors) -> None:
    """Fill `expected` from the file that was found under this seal. Raises `BadFile`, `expected` filled in part."""
    with _opened(path) as file:
        if file.found.seal != seal:
            raise BadFile("checksum", "it is another file than before")
        if {name for name in file.table if name != _IDS} != set(expected):
            raise BadFile("fingerprint", "it holds other tensors")
        for name, tensor in expected.items():
            dtype, shape, start, _ = file.table[name]
            if (_DTYPES[dtype], shape) != (tensor.dtype, list(tensor.shape)):
                raise BadFile("fingerprint", f"{name} has another shape")
            target = _bytes_of(tensor)
            file.fill(start, target)
            if f"{zlib.crc32(target):08x}" != file.sums.get(name):
                raise BadFile("checksum", f"{name} is not what was written")


def write_cause(error: OSError) -> str:
    """What kept a file from being written, in a word for counters."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "disk_full" if error.errno in full else "unwritable"


class _Opened:
    """A file with its header read and proved."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadFile("unreadable", "it is no file")
        size = status.st_size
        length = int.from_bytes(self._read(0, _LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise BadFile("checksum", "the header is not whole")
        header = orjson.loads(self._read(_LENGTH_BYTES, length))
        metadata = dict(header.pop(_METADATA))
        self._data_start = _LENGTH_BYTES + length
        self.table: dict[str, tuple[str, list[int], int, int]] = {}
        at = 0
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            dtype, shape = entry["dtype"], entry["shape"]
            if len(shape) > _MOST_DIMENSIONS or not all(0 <= length <= size for length in shape):
                raise BadFile("checksum", "a tensor has no such shape")
            if start != at or end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
                raise BadFile("checksum", "tensors do not lie one after the other")
            self.table[name] = dtype, shape, start, end
            at = end
        if self._data_start + at != size:
            raise BadFile("checksum", f"it has {size} bytes instead of {self._data_start + at}")
        start, end = self.table[_IDS][2:]
        ids = self._read(self._data_start + start, end - start)
        seal = metadata.pop("seal")
        if seal != _seal({_METADATA: metadata, **header}, ids):
            raise BadFile("checksum", "the header is not what was written")
        if metadata["format"] != FORMAT:
            raise BadFile("fingerprint", "it is of another format")
        self.sums = {name.removeprefix(_SUM): value for name, value in metadata.items() if name.startswith(_SUM)}
        self.found = Found(
            _label(metadata, ids), Identity(metadata["fingerprint"], metadata["numerics"]), seal, size
        )

    def fill(self, start: int, target: memoryview) -> None:
        """Read what is at `start` of the data."""
        at, done = self._data_start + start, 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], at + done)
            if not count:
                raise BadFile("checksum", "it ends too early")
            done += count

    def _read(self, start: int, count: int) -> bytes:
        data = os.pread(self._descriptor, count, start)
        if len(data) != count:
            raise BadFile("checksum", "it ends too early")
        return data


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BadFile("unreadable", error.strerror or "cannot be opened") from error
    try:
        yield _Opened(descriptor)
    except OSError as error:
        raise BadFile("unreadable", error.strerror or "cannot be read") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise BadFile("checksum", "the header is not what was written") from error
    finally:
        os.close(descriptor)


def _header(label: Label, identity: Identity, tensors: Tensors, sums: dict[str, int]) -> dict[str, Any]:
    """All but the seal. Tensors lie in this order, then the ids."""
    table: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        table[name] = _entry(_NAMES[tensor.dtype], list(tensor.shape), at, tensor.nbytes)
        at += tensor.nbytes
    table[_IDS] = _entry("I32", [len(label.ids) // 4], at, len(label.ids))
    boundary = label.boundary
    metadata = {
        "format": FORMAT,
        "part": label.kind,
        "fingerprint": identity.fingerprint,
        "numerics": identity.numerics,
        "tenant": label.tenant,
        "parent": label.parent.hex(),
        "start": str(label.start),
        "digest": boundary.digest.hex(),
        "end": str(boundary.end),
        "kind": boundary.kind,
        "messages": str(boundary.messages),
        **{f"{_SUM}{name}": f"{value:08x}" for name, value in sums.items()},
    }
    return {_METADATA: metadata, **table}


def _sealed(header: dict[str, Any], ids: bytes) -> tuple[str, bytes]:
    """The seal of a header, and its text with the seal in it."""
    seal = _seal(header, ids)
    text = orjson.dumps({**header, _METADATA: {**header[_METADATA], "seal": seal}})
    return seal, text + b" " * (-len(text) % 8)


def _label(metadata: dict[str, str], ids: bytes) -> Label:
    digest, parent = bytes.fromhex(metadata["digest"]), bytes.fromhex(metadata["parent"])
    start, end = int(metadata["start"]), int(metadata["end"])
    kind = metadata["kind"]
    if metadata["part"] not in get_args(PartKind) or kind not in get_args(BoundaryKind):
        raise ValueError("unknown kind")
    if len(digest) != DIGEST_BYTES or len(parent) not in (0, DIGEST_BYTES):
        raise ValueError("no digest")
    if not 0 <= start < end or len(ids) != 4 * (end - start):
        raise ValueError("ids do not fill what lies between the boundaries")
    boundary = Boundary(end, digest, kind, int(metadata["messages"]))  # type: ignore[arg-type]
    return Label(metadata["part"], metadata["tenant"], parent, start, boundary, ids)  # type: ignore[arg-type]


def _seal(header: dict[str, Any], ids: bytes) -> str:
    state = sha256(orjson.dumps(header, option=orjson.OPT_SORT_KEYS))
    state.update(ids)
    return state.hexdigest()


def _entry(dtype: str, shape: list[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor on the host, as it lies in memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


_private: Callable[[str, int], int] = lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)  # noqa: E731
