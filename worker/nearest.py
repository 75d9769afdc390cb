"""Which of the boundaries that extend one goes on most like a prompt. Ids are compared as bytes, never one by one."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.snapshot_index import Node

ID_BYTES = 4
BY_IDS = attrgetter("ids")
MOST_PASSED_OVER = 64


def nearest_child(node: Node, data: bytes, at: int, *, stored: bool = False) -> tuple[Node, int] | None:
    """The child that shares most bytes with `data` from `at` on, and how many, in whole ids.

    In order of ids the closest ones stand beside the place where the rest of the prompt would go. `stored`: only
    those that snapshots are kept of are looked at, and not many others passed over on the way to them.
    """
    if not node.children:
        return None
    if len(node.children) == 1:
        near = [child for child in node.children.values() if not stored or child.has_snapshots]
    else:
        if node.by_ids is None:
            node.by_ids = sorted(node.children.values(), key=BY_IDS)
        place = bisect_left(node.by_ids, data[at:], key=BY_IDS)
        span = MOST_PASSED_OVER if stored else 1
        before, after = reversed(node.by_ids[max(place - span, 0) : place]), node.by_ids[place : place + span]
        sides = (
            next((child for child in side if not stored or child.has_snapshots), None) for side in (before, after)
        )
        near = [child for child in sides if child is not None]
    if not near:
        return None
    same, child = max(((_common_bytes(data, at, child.ids), child) for child in near), key=lambda pair: pair[0])
    return child, same


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
