"""Which of the boundaries that extend one goes on most like a prompt. Ids are compared as bytes, never one by one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.snapshot_index import Node

ID_BYTES = 4
BY_IDS = attrgetter("ids")
MOST_LOOKED_AT = 64


def nearest_child(node: Node, data: bytes, at: int) -> tuple[Node, int] | None:
    """The child that shares most bytes with `data` from `at` on, and how many, in whole ids.

    In order of ids the closest ones stand beside the place where the rest of the prompt would go.
    """
    sides = (next(side, None) for side in _outwards(node, data, at))
    near = [(child, _common_bytes(data, at, child.ids)) for child in sides if child is not None]
    return max(near, key=_bytes_of, default=None)


def most_stored_child(node: Node, data: bytes, at: int) -> tuple[Node, int] | None:
    """The child by way of which snapshots hold most bytes of `data` from `at` on, and how many, in whole ids.

    A child whose own snapshot was cut may hold less than one that shares fewer ids. On either side not many are looked
    at.
    """
    best: tuple[Node, int] | None = None
    for side in _outwards(node, data, at):
        for child in islice(side, MOST_LOOKED_AT):
            if not child.has_snapshots:
                continue
            same = _common_bytes(data, at, child.ids)
            if best is not None and same <= best[1]:
                break  # those further out share no more
            held = same if child.slot is None else min(same, child.stored * ID_BYTES - at)
            if best is None or held > best[1]:
                best = child, held
    return best


def _bytes_of(found: tuple[Node, int]) -> int:
    return found[1]


def _outwards(node: Node, data: bytes, at: int) -> tuple[Iterator[Node], Iterator[Node]]:
    """The children before and after the rest of the prompt in order of ids, the closest first."""
    if len(node.children) < 2:
        return iter(node.children.values()), iter(())
    if node.by_ids is None:
        node.by_ids = sorted(node.children.values(), key=BY_IDS)
    ordered, place = node.by_ids, bisect_left(node.by_ids, data[at:], key=BY_IDS)
    return (ordered[i] for i in range(place - 1, -1, -1)), (ordered[i] for i in range(place, len(ordered)))


def _common_bytes(data: bytes, at: int, ids: bytes) -> int:
    """Length of the longest common prefix of data[at:] and `ids`, in bytes of whole ids. Halves the range."""
    if data.startswith(ids, at):
        return len(ids)
    view = memoryview(ids)
    low, high = 0, min(len(ids), len(data) - at) // ID_BYTES  # ids up to `low` are equal, beyond `high` not all
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(view[low * ID_BYTES : middle * ID_BYTES], at + low * ID_BYTES):
            low = middle
        else:
            high = middle - 1
    return low * ID_BYTES
