"""In which order parts go from a tier, kept up to date as they come, go and are used: nothing is ever sorted anew.

Entries of the heaps are checked when they are taken. What was used since it was entered is entered again, later; what
is no candidate any more is forgotten, and entered again when it becomes one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from worker.snapshot_index import Node
from worker.tiers.part_file import PartKind

_SLACK = 64  # entries that say nothing new before a heap is made anew


class _Heap:
    """Nodes by `rank`, which may only rise while they are in it unless they are entered again."""

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool]) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._entries: list[tuple[float, int, Node]] = []
        self._serial = 0

    def push(self, node: Node) -> None:
        self._serial += 1
        heapq.heappush(self._entries, (self._rank(node), self._serial, node))

    def take(self, passed_over: Callable[[Node], bool]) -> Iterator[Node]:
        """Candidates in order. Whoever takes one has made it none before taking the next."""
        aside: list[Node] = []
        try:
            while self._entries:
                rank, _, node = heapq.heappop(self._entries)
                if not self._is_candidate(node):
                    continue
                if self._rank(node) > rank:
                    self.push(node)
                elif passed_over(node):
                    aside.append(node)
                else:
                    aside.append(node)  # or it would be lost where it is not taken after all
                    yield node
        finally:
            for node in aside:
                if self._is_candidate(node):
                    self.push(node)

    def tidy(self, most: int) -> None:
        """Forget entries that are none any more, or doubled, once there are more than so many."""
        if len(self._entries) > most:
            nodes = dict.fromkeys(node for _, _, node in self._entries)
            self._entries = []
            for node in nodes:
                if self._is_candidate(node):
                    self.push(node)


class Order:
    """Of the parts of one tier; see `worker.tiers.ledger` for who goes first."""

    def __init__(
        self,
        has: Callable[[Node, PartKind], bool],
        is_leaf: Callable[[Node], bool],
        last_use: Callable[[Node], float],
        *,
        recurs: bool,
    ) -> None:
        """`has`: whether the tier has the `kv` or the `state` of a boundary. `is_leaf`: nothing there extends it."""
        self._has = has
        self._recurs = recurs
        self._states_below: Counter[Node] = Counter()

        def rank(leaf: Node) -> float:
            # Where models recur, a leaf without a state is of no use to anybody: it goes with what it was kept for.
            return float("-inf") if recurs and not has(leaf, "state") else last_use(leaf)

        self._leaves = _Heap(rank, lambda node: self._holds(node) and is_leaf(node))
        self._inner = _Heap(last_use, lambda node: self._states_below[node] > 0 and has(node, "state"))

    def added(self, node: Node, kind: PartKind) -> None:
        self._leaves.push(node)
        if kind == "state":
            self._push_inner(node)
            for above in node.ancestors():
                self._states_below[above] += 1
                if self._states_below[above] == 1:
                    self._push_inner(above)

    def dropped(self, node: Node, kind: PartKind) -> None:
        """The tier does not have it any more."""
        if kind == "state":
            for above in node.ancestors():
                self._states_below[above] -= 1
                if not self._states_below[above]:
                    del self._states_below[above]
        for each in (node, node.parent):
            if each is not None and self._holds(each):
                self._leaves.push(each)

    def inner_states(self, fixed: Collection[Node]) -> Iterator[Node]:
        """Those whose keys and values stay with what was built on them, that are neither a head's nor a branch's."""
        return self._inner.take(lambda node: node in fixed or node.is_branch)

    def leaves(self, fixed: Collection[Node]) -> Iterator[Node]:
        return self._leaves.take(lambda node: node in fixed)

    def tidy(self, parts: int) -> None:
        """`parts`: how many there are."""
        self._leaves.tidy(4 * parts + _SLACK)
        self._inner.tidy(4 * parts + _SLACK)

    def _push_inner(self, node: Node) -> None:
        if node.kind != "head" and self._states_below[node] and self._has(node, "state"):
            self._inner.push(node)

    def _holds(self, node: Node) -> bool:
        return self._has(node, "kv") or self._has(node, "state")
