"""What one tier holds, in bytes, and what goes from it when its budget is short. Knows nothing of files or memory.

What goes first are states inside a conversation that are neither a head's nor a branch point's: the keys and values
there stay with what was built on them. Then leaves, by when they were last used; what only they needed goes with them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from worker.snapshot_index import AbsentReason, Node, PartKey, SnapshotIndex
from worker.tiers.part_file import PartKind

TierName = Literal["host", "disk"]


@dataclass(slots=True, eq=False)
class Part:
    """One part of one boundary in one tier, of `size` bytes. `place` is the tier's own way to find it."""

    node: Node
    kind: PartKind
    size: int
    place: Any
    used_at: float  # by the tier's clock; its node may have been used later
    foreign: bool = False  # computed with other numerics


class Ledger:
    """The parts of one tier. `freed` is told of each that goes, once the index no longer names it."""

    def __init__(
        self,
        tier: TierName,
        limit: int,
        index: SnapshotIndex,
        freed: Callable[[Part], None],
        clock: Callable[[], float],
        *,
        recurs: bool,
    ) -> None:
        """`recurs`: a boundary without a state cannot be restored."""
        self.tier: TierName = tier
        self.limit = limit
        self.held = 0
        self.promised = 0  # bytes of what is being written
        self.evictions = 0
        self.busy: Counter[Node] = Counter()  # read from now: they stay, and so does what they extend
        self.parts: set[Part] = set()
        self._index = index
        self._freed = freed
        self._clock = clock
        self._recurs = recurs

    @property
    def snapshots(self) -> int:
        """Boundaries that were kept for their own sake: those with a state, or that nothing extends here."""
        return len({p.node for p in self.parts if (p.kind == "state" if self._recurs else self._is_leaf(p.node))})

    def key(self, kind: PartKind) -> PartKey:
        return self.tier, kind

    def find(self, node: Node, kind: PartKind) -> Part | None:
        part = node.parts.get(self.key(kind))
        return part if isinstance(part, Part) else None

    def add(self, part: Part) -> None:
        self._index.add_part(part.node, self.key(part.kind), part)
        self.parts.add(part)
        self.held += part.size

    def drop(self, part: Part, reason: AbsentReason, *, replaced: bool = False) -> None:
        """It is never found again. `replaced`: another one has taken its place already."""
        self._index.drop_part(part.node, self.key(part.kind), reason)
        self.parts.remove(part)
        self.held -= part.size
        if not replaced:
            self._freed(part)

    def drop_node(self, node: Node, reason: AbsentReason) -> None:
        for kind in ("state", "kv"):
            part = self.find(node, kind)
            if part is not None:
                self.drop(part, reason)

    def flush(self, keep: Collection[Node]) -> int:
        """Drop everything but what belongs to these boundaries; returns the bytes that came free."""
        before = self.held
        for part in list(self.parts):
            if part.node not in keep:
                self.drop(part, "flushed")
        return before - self.held

    def room(self, size: int, protect: Collection[Node] = ()) -> bool:
        """Let parts go until `size` bytes fit. False, and nothing went, where that cannot be had."""
        short = self.held + self.promised + size - self.limit
        if short <= 0:
            return True
        fixed = self._fixed(protect)
        if short > sum(part.size for part in self.parts if part.node not in fixed):
            return False
        for victim in self._victims(fixed):
            if self.held + self.promised + size <= self.limit:
                break
            self.evictions += 1
            self.drop(victim, "evicted")
        self._index.trim()
        return self.held + self.promised + size <= self.limit

    def prune(self, node: Node, reason: AbsentReason) -> None:
        """Let what this boundary holds for itself alone go, and what is of no use without it."""
        state = self.find(node, "state")
        if state is not None:
            self.drop(state, reason)
        above: Node | None = node
        while above is not None and self._is_leaf(above) and above not in self.busy:
            kv = self.find(above, "kv")
            if (
                kv is None
                or self.find(above, "state") is not None
                or (above is not node and above.slot is not None)
            ):
                return
            self.drop(kv, reason)
            above = above.parent

    def _fixed(self, protect: Iterable[Node]) -> set[Node]:
        fixed: set[Node] = set()
        for node in (*protect, *self.busy):
            above: Node | None = node
            while above is not None and above not in fixed:
                fixed.add(above)
                above = above.parent
        return fixed

    def _is_leaf(self, node: Node) -> bool:
        return not any(self.key("kv") in child.parts for child in node.children.values())

    def _victims(self, fixed: set[Node]) -> Iterable[Part]:
        """In order. Whoever takes one has dropped it before taking the next."""
        if self._recurs:
            yield from sorted(self._inner_states(fixed), key=lambda part: self._age(part.node))
        leaves = [(self._rank(p.node), i, p.node) for i, p in enumerate(self.parts) if self._is_leaf(p.node)]
        heapq.heapify(leaves)
        serial = len(self.parts)
        while leaves:
            _, _, node = heapq.heappop(leaves)
            if node in fixed:
                continue
            for kind in ("state", "kv"):
                part = self.find(node, kind)
                if part is not None:
                    yield part
            parent = node.parent
            if parent is not None and self._holds(parent) and self._is_leaf(parent):
                serial += 1
                heapq.heappush(leaves, (self._rank(parent), serial, parent))

    def _inner_states(self, fixed: set[Node]) -> list[Part]:
        states = [part for part in self.parts if part.kind == "state"]
        inner: set[Node] = set()
        for part in states:
            above = part.node.parent
            while above is not None and above not in inner:
                inner.add(above)
                above = above.parent
        return [
            part
            for part in states
            if part.node in inner
            and part.node not in fixed
            and part.node.kind != "head"
            and not part.node.is_branch
        ]

    def _holds(self, node: Node) -> bool:
        return any(self.find(node, kind) is not None for kind in ("kv", "state"))

    def _rank(self, leaf: Node) -> float:
        """Where models recur, a leaf without a state is of no use to anybody: it goes with what it was kept for."""
        useless = self._recurs and self.find(leaf, "state") is None
        return float("-inf") if useless else self._age(leaf)

    def _age(self, node: Node) -> float:
        """Rises with its last use."""
        return max(self._used_at(node), node.used_at)

    def _used_at(self, node: Node) -> float:
        """When anything of it here was used last."""
        return max(p.used_at for p in (self.find(node, "kv"), self.find(node, "state")) if p is not None)
