"""How often boundaries are asked for again, by what has become of them: learned from all requests, kept or not.

A request *asks for* the deepest boundary it shares with what was computed before, whether a snapshot of it is there
or was evicted. So a wrong eviction is seen like a right one, and traffic that forks, repeats itself or only grows
teaches what to keep. Counts begin with a few made up ones, which the first dozens of requests outweigh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from worker.snapshot_index import Node

Standing = Literal["new", "going_on", "repeated", "inner", "passed", "again"]

MEMORY = 1000  # boundaries of one standing that are remembered at most: what traffic was like before fades


class Returns:
    """For each standing of a boundary, how many were seen in it and how many of those were asked for."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {"new": 1, "going_on": 3, "repeated": 3, "inner": 0.5, "again": 2}
        self._seen: dict[str, float] = {"new": 2, "going_on": 4, "repeated": 4, "inner": 10, "again": 4}

    def share(self, standing: Standing) -> float:
        """The part of boundaries of that standing that are asked for again. What was passed counts as none."""
        return 0.0 if standing == "passed" else min(1.0, self._asked[standing] / self._seen[standing])

    def ask(self, node: Node) -> None:
        """A request asks for this boundary."""
        if node.standing in self._asked:
            self._asked[node.standing] += 1
        node.standing = ""
        node.asks += 1
        node.revisited |= bool(node.children) or node.inner

    def see(self, node: Node) -> None:
        """Count a boundary under what it is now, once: after it was computed, asked for or passed."""
        now = standing(node)
        if node.standing != now:
            node.standing = now
            if now in self._seen:
                self._seen[now] += 1
                if self._seen[now] > MEMORY:
                    self._seen[now] /= 2
                    self._asked[now] /= 2


def standing(node: Node) -> Standing:
    """What has become of a boundary.

    The last of its conversation: `new`, `going_on` where it has come back before, `repeated` where this very prompt
    has. Others: `inner` where nobody has asked for it, `passed` where the conversation goes on from it, `again`
    where more than that one request has asked for it.
    """
    if not (node.children or node.inner):
        if node.asks:
            return "repeated"
        return "going_on" if has_come_back(node.ancestors()) else "new"
    if node.revisited or node.asks > 1:
        return "again"
    return "passed" if node.asks else "inner"


def has_come_back(above: Iterable[Node]) -> bool:
    """Whether a conversation with these boundaries has been asked for, and not only a head that others share."""
    return any(node.asks and node.kind != "head" for node in above)
