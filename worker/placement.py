"""Which boundaries of a request are worth a snapshot: a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.messages import Boundary
from worker.snapshot_index import Node

STRETCH_TOKENS = 8192  # in a long stretch, about one snapshot in so many tokens
MAX_BRANCHES = 4  # branch points taken by one request, deepest first: one client must not flood the slots


def worth_keeping(
    boundaries: Sequence[Boundary],
    total_tokens: int,
    depth: int,
    chain: Sequence[Node],
    *,
    before_last: bool = False,
) -> list[Boundary]:
    """The boundaries in (depth, total_tokens] to keep, rising: head, newest, branch points, and periodic ones.

    The newest is also the last cut inside the last message, if that is a long one, and with `before_last` the end of
    the message before it: where clients write the last one anew each time.

    `chain` are the nodes of the request's first boundaries, known from earlier requests. Where the request leaves
    what is known, or passes a node that others leave another way, more will branch: that is a branch point. So is
    the last one below the end of a prompt that has come before, which cannot start from its end.
    """
    ahead = [boundary for boundary in boundaries if depth < boundary.end <= total_tokens]
    if not ahead:
        return []
    ends = {ahead[-1].end, *_periodic(ahead, total_tokens, depth)}
    ends.update(boundary.end for boundary in ahead if boundary.kind == "head")
    if len(ahead) > 1 and (before_last or ahead[-2].kind == "interior"):
        # A text that goes on has no boundary where this one ends: the last cut of the grid is what both have.
        ends.add(ahead[-2].end)
    within = [node for node in chain if depth < node.end < total_tokens]
    branches = [node.end for node in within if node is within[-1] or node.is_branch]
    ends.update(branches[-MAX_BRANCHES:])
    kept = {node.end for node in chain if node.slot is not None and node.is_whole}
    return [boundary for boundary in ahead if boundary.end in ends and boundary.end not in kept]


def _periodic(ahead: Sequence[Boundary], total_tokens: int, depth: int) -> list[int]:
    """For each multiple of the stretch the last boundary up to half a stretch after it, if it is a new one."""
    picked: list[int] = []
    previous = depth
    for mark in range((depth // STRETCH_TOKENS + 1) * STRETCH_TOKENS, total_tokens, STRETCH_TOKENS):
        limit = mark + STRETCH_TOKENS // 2
        end = max((b.end for b in ahead if previous < b.end <= limit), default=None)
        if end is not None:
            picked.append(end)
            previous = end
    return picked
