"""Where two stored conversations part. Reads only."""

from __future__ import annotations

from protocol.control import Difference, Side
from worker.nearest import ID_BYTES
from worker.snapshot_index import Node


def difference(a: Node, b: Node) -> Difference:
    """Compare the ids on the paths to two nodes, whosever they are, and tell what each has after the common part."""
    paths = [list(reversed([node, *node.ancestors()])) for node in (a, b)]
    first, second = (b"".join(node.ids for node in path) for path in paths)
    common = _common_tokens(first, second)
    shared = {node.end for node in paths[0]} & {node.end for node in paths[1]}
    longer = paths[0] if len(first) // ID_BYTES > common else paths[1]
    return Difference(
        common_tokens=common,
        common_boundary=max((end for end in shared if end <= common), default=0),
        message=_message_at(longer, common),
        a=_side(a, paths[0], common),
        b=_side(b, paths[1], common),
    )


def _common_tokens(first: bytes, second: bytes) -> int:
    """How many ids from the start on are equal. Halves the range."""
    low, high = 0, min(len(first), len(second)) // ID_BYTES  # equal up to `low`, not beyond `high`
    while low < high:
        middle = (low + high + 1) // 2
        if first.startswith(memoryview(second)[low * ID_BYTES : middle * ID_BYTES], low * ID_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def _message_at(path: list[Node], token: int) -> int | None:
    """Index of the client's message that a token lies in; None in tools before any message, or after the last."""
    before = 0
    for node in path:
        if node.end > token:
            return None if node.kind == "head" and not node.messages else before
        before = node.messages
    return None


def _side(node: Node, path: list[Node], common: int) -> Side:
    return Side(
        slot=node.slot,
        tenant=node.tenant,
        tokens=node.end,
        messages=node.messages,
        tokens_after=node.end - common,
        boundaries_after=[above.end for above in path if above.end > common],
    )
