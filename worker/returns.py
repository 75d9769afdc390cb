"""How often boundaries are asked for again, by what has become of them, and how soon: learned from requests.

A request *asks for* the deepest boundary it shares with what was computed before, whether a snapshot of it is there
or was evicted. So a wrong eviction is seen like a right one, and traffic that forks, repeats itself or only grows
teaches what to keep. Counts begin with a few made up ones, which the first dozens of requests outweigh.

What a request adds tells most: of prompts that go on with a tool's few lines nearly all are gone on from, of long texts
that were never seen before few. So shares are counted for each size of what was added, too, and what is seldom seen
follows the share of its standing.

Many clients write the last message of a prompt anew each time and repeat what stands before it. Whether they do shows
in how often a boundary just before the last one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log
from typing import Literal

from protocol.messages import Boundary
from worker.snapshot_index import Node

Standing = Literal["new", "going_on", "repeated", "inner", "cut", "head", "before_last", "passed", "again"]

PAUSE_SECONDS = 600.0  # idle times well below this hardly count, until pauses have been seen
SHORTEST_PAUSE = 1.0  # what comes back sooner came together
PAUSE_STEP = 1 / 16  # part of a pause just seen that goes, by its logarithm, into the typical one; at first more
OLDER_PAUSE = 0.7  # what a conversation's pause counts for beside the one after it
LEAST_BITS, MOST_BITS = 7, 17  # sizes of what was added, by powers of two: smaller and larger count with these
PRIOR = 2.0  # requests for a size that must be expected for its own share to weigh as much as that of all sizes
MEMORY = 1000  # boundaries of one standing that are remembered at most: what traffic was like before fades


class Returns:
    """For each standing of a boundary, how many were seen in it and how many of those were asked for.

    `pause` is a typical time in seconds between two requests of a conversation, as seen so far. Each conversation
    has its own besides, from its second request on: a person's among agents' is not over after a minute.
    """

    def __init__(self) -> None:
        self.pause = PAUSE_SECONDS
        self._pauses = 0
        self._asked: dict[str, float] = {"new": 1, "going_on": 3, "repeated": 3, "again": 2}
        self._seen: dict[str, float] = {"new": 2, "going_on": 4, "repeated": 4, "again": 4}
        self._asked |= {"inner": 0.5, "cut": 0.3, "head": 1, "before_last": 0.5, "passed": 0.02}
        self._seen |= {"inner": 10, "cut": 10, "head": 4, "before_last": 8, "passed": 10}
        self._by_size: dict[tuple[str, int], _Count] = {}

    def share(self, standing: Standing, added: int | None = None) -> float:
        """The part of boundaries of that standing that are asked for again; where known, of what added as much."""
        share = min(1.0, self._asked[standing] / self._seen[standing])
        count = None if added is None else self._by_size.get((standing, _size(added)))
        if count is None:
            return share
        # How often this size was asked for beside what its standing lets expect: of what is seldom seen little is said.
        return min(1.0, share * (count.asked + PRIOR) / (count.seen * share + PRIOR))

    def paused(self, seconds: float) -> None:
        """A conversation has gone on after this time."""
        self._pauses += 1
        step = max(PAUSE_STEP, 1 / (self._pauses + 1))  # the made up one counts as one
        self.pause *= (max(seconds, SHORTEST_PAUSE) / self.pause) ** step

    def pause_of(self, node: Node) -> float:
        """A typical time between two requests of its conversation: as seen in it, and in all, which counts as one."""
        weight, logs = node.pauses
        return exp((log(self.pause) + logs) / (1 + weight))

    def ask(self, node: Node, now: float, *, goes_on: bool = True) -> None:
        """A request asks for this boundary. `goes_on`: it adds to what was there, and is not the same prompt again.

        Those come in bursts, of retries or of many clients, and say nothing of how long a conversation rests.
        """
        node.returned_at = now
        if goes_on and node.left_at is not None and not node.children and node.kind != "head":
            seconds = max(now - node.left_at, SHORTEST_PAUSE)
            self.paused(seconds)
            weight, logs = node.pauses
            node.pauses = OLDER_PAUSE * weight + 1, OLDER_PAUSE * logs + log(seconds)
        if node.standing:
            self._asked[node.standing] += 1
            if node.added is not None:
                self._by_size[node.standing, _size(node.added)].asked += 1
        node.standing = ""
        node.asks += 1
        node.revisited |= bool(node.children) or node.inner

    def see(self, node: Node) -> None:
        """Count a boundary under what it is now, once: after it was computed, asked for or passed."""
        now = standing(node)
        if node.standing != now:
            node.standing = now
            self._seen[now] += 1
            if self._seen[now] > MEMORY:
                self._seen[now] /= 2
                self._asked[now] /= 2
            if node.added is not None:
                self._by_size.setdefault((now, _size(node.added)), _Count()).see()


class _Count:
    """Of one standing and size: how many were seen and asked for."""

    __slots__ = ("asked", "seen")

    def __init__(self) -> None:
        self.asked = self.seen = 0.0

    def see(self) -> None:
        self.seen += 1
        if self.seen > MEMORY:
            self.seen /= 2
            self.asked /= 2


def _size(added: int) -> int:
    return min(max(added.bit_length(), LEAST_BITS), MOST_BITS)


def added(chain: Sequence[Node], boundaries: Sequence[Boundary], *, absorbed: bool = False) -> int | None:
    """How many tokens a request has beyond what earlier ones had, of which `chain` are the nodes of its prompt.

    None where that is not known. What is `absorbed` was added by nobody: it counts as its prompt did.
    """
    known = next((node for node in reversed(chain) if node.asks or node.standing), None)
    if absorbed:
        return known.added if known else None
    return boundaries[-1].end - (known.end if known else 0)


def standing(node: Node, *, goes_on: bool = False) -> Standing:
    """What has become of a boundary. `goes_on`: a conversation is about to go on from it.

    The last of its conversation: `new`, `going_on` where it has come back before, `repeated` where this very prompt
    has. Others: where nobody has asked for it `head`, `cut` inside a message, `before_last` where only one message
    follows, or `inner`; `passed` where the conversation goes on from it, `again` where more than that one request
    has asked for it.
    """
    if not (node.children or node.inner or goes_on):
        if node.asks:
            return "repeated"
        return "going_on" if has_come_back(node.ancestors()) else "new"
    if node.revisited or node.asks > 1:
        return "again"
    if node.asks:
        return "passed"
    if node.kind == "head":
        return "head"
    if node.kind == "interior":
        return "cut"
    return "before_last" if node.before_last else "inner"


def has_come_back(above: Iterable[Node]) -> bool:
    """Whether a conversation with these boundaries has been asked for, and not only a head that others share."""
    return any(node.asks and node.kind != "head" for node in above)
