"""Which of the boundaries that extend one goes on most like a prompt. Ids are compared as bytes, never one by one."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.snapshot_index import Node

ID_BYTES = 4
BY_IDS = attrgetter("ids")


def nearest_child(node: Node, data: bytes, at: int) -> tuple[Node, int] | None:
    """The child that shares most bytes with `data` from `at` on, and how many, in whole ids.

    In order of ids the closest ones stand beside the place where the rest of the prompt would go.
    """
    if not node.children:
        return None
    if len(node.children) == 1:
        near = list(node.children.values())
    else:
        if node.by_ids is None:
            node.by_ids = sorted(node.children.values(), key=BY_IDS)
        place = bisect_left(node.by_ids, data[at:], key=BY_IDS)
        near = node.by_ids[max(place - 1, 0) : place + 1]
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
