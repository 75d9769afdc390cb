"""What one tier holds, in bytes, and what goes from it when its budget is short. Knows nothing of files or memory.

What goes first are states inside a conversation that are neither a head's nor a branch point's: the keys and values
there stay with what was built on them. Then leaves, by when they were last used; what only they needed goes with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from protocol.control import EventKind
from worker.events import EventLog
from worker.snapshot_index import AbsentReason, Node, PartKey, SnapshotIndex
from worker.tiers.order import Order
from worker.tiers.part_file import PartKind

TierName = Literal["host", "disk"]
PartOf = tuple[Node, PartKind]
_KINDS: tuple[PartKind, ...] = ("state", "kv")


@dataclass(slots=True, eq=False)
class Part:
    """One part of one boundary in one tier, of `size` bytes. `place` is the tier's own way to find it."""

    node: Node
    kind: PartKind
    size: int
    place: Any
    used_at: float  # by the tier's clock; its node may have been used later
    foreign: bool = False  # computed with other numerics


def needed_by(nodes: Collection[Node]) -> set[PartOf]:
    """What these boundaries are restored from."""
    needed: set[PartOf] = {(node, "state") for node in nodes}
    return needed | {(each, "kv") for node in nodes for each in (node, *node.ancestors())}


class Ledger:
    """The parts of one tier. `freed` is told of each that goes, once the index no longer names it, and whether what it
    was must be gone at once: what only makes room for others need not.

    What the operator has pinned stays, and so does all that it extends.
    """

    def __init__(
        self,
        tier: TierName,
        limit: int,
        index: SnapshotIndex,
        freed: Callable[[Part, bool], None],
        clock: Callable[[], float],
        events: EventLog,
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
        self.parts: dict[Part, None] = {}  # in the order in which they came
        self._index = index
        self._freed = freed
        self._clock = clock
        self._events = events
        self._recurs = recurs
        # Boundaries that were kept for their own sake: those with a state, or that nothing extends here.
        self.snapshots: set[Node] = set()
        self._order = Order(self._has, self._is_leaf, self._last_use, recurs=recurs)

    def key(self, kind: PartKind) -> PartKey:
        return self.tier, kind

    def find(self, node: Node, kind: PartKind) -> Part | None:
        part = node.parts.get(self.key(kind))
        return part if isinstance(part, Part) else None

    def add(self, part: Part, *, is_new: bool = True) -> None:
        """`is_new`: it has just been written, and was not found here."""
        self._index.add_part(part.node, self.key(part.kind), part)
        self.parts[part] = None
        self.held += part.size
        self._order.added(part.node, part.kind)
        self._note_snapshots(part.node)
        if is_new:
            self.tell("write", "", part.node, part.kind)

    def drop(self, part: Part, reason: AbsentReason, *, replaced: bool = False, at_once: bool = True) -> None:
        """It is never found again. `replaced`: another one has taken its place already."""
        self._index.drop_part(part.node, self.key(part.kind), reason)
        del self.parts[part]
        self.held -= part.size
        self._order.dropped(part.node, part.kind)
        self._note_snapshots(part.node)
        self.tell("drop", "replaced" if replaced else reason, part.node, part.kind)
        if not replaced:
            self._freed(part, at_once)

    def tell(self, kind: EventKind, cause: str, node: Node, part: PartKind) -> None:
        """Something happened to a part here."""
        self._events.add(kind, cause, digest=node.digest, tokens=node.end, tier=self.tier, part=part)

    def drop_node(self, node: Node, reason: AbsentReason) -> None:
        for part in list(self._parts_of(node)):
            self.drop(part, reason)

    def flush(self, keep: Collection[PartOf]) -> int:
        """Drop everything but these parts; returns the bytes that came free."""
        before = self.held
        for part in list(self.parts):
            if (part.node, part.kind) not in keep:
                self.drop(part, "flushed")
        return before - self.held

    def room(self, size: int, protect: Collection[Node] = ()) -> bool:
        """Let parts go until `size` bytes fit. False, and nothing went, where that cannot be had."""
        short = self.held + self.promised + size - self.limit
        if short <= 0:
            return True
        fixed = self._fixed(protect)
        stays = sum(part.size for node in fixed for part in self._parts_of(node))
        if short > self.held - stays:
            return False
        for victim in self._victims(fixed):
            if self.held + self.promised + size <= self.limit:
                break
            self.evictions += 1
            self.drop(victim, "evicted", at_once=False)
        self._index.trim()
        return self.held + self.promised + size <= self.limit

    def needed_only_by(self, nodes: Collection[Node]) -> list[Part]:
        """What these boundaries hold for themselves alone, and what is of no use without them."""
        chosen, going = set(nodes), dict[Part, None]()
        # The deepest first, or those would still need what is above them.
        for node in sorted(nodes, key=lambda node: -node.end):
            state = self.find(node, "state")
            if state is not None and node not in self.busy:
                going[state] = None
            above: Node | None = node
            while above is not None and (kv := self.find(above, "kv")) is not None:
                if above not in chosen and (above.slot is not None or above.pinned):
                    break
                own_state = self.find(above, "state")
                if above in self.busy or (own_state is not None and own_state not in going):
                    break
                if any(below not in going for below in self._extending(above)):
                    break
                going[kv] = None
                above = above.parent
        return list(going)

    def _extending(self, node: Node) -> Iterable[object]:
        """The keys and values here that those of a boundary are continued by."""
        key = self.key("kv")
        return (child.parts[key] for child in node.children.values() if key in child.parts)

    def _fixed(self, protect: Iterable[Node]) -> set[Node]:
        fixed: set[Node] = set()
        for node in (*protect, *self.busy, *self._index.pinned):
            above: Node | None = node
            while above is not None and above not in fixed:
                fixed.add(above)
                above = above.parent
        return fixed

    def _is_leaf(self, node: Node) -> bool:
        return next(iter(self._extending(node)), None) is None

    def _victims(self, fixed: set[Node]) -> Iterable[Part]:
        """In order. Whoever takes one has dropped it before taking the next."""
        self._order.tidy(len(self.parts))
        if self._recurs:
            for node in self._order.inner_states(fixed):
                yield from self._parts_of(node, "state")
        for node in self._order.leaves(fixed):
            yield from self._parts_of(node)

    def _parts_of(self, node: Node, *kinds: PartKind) -> Iterable[Part]:
        """Of all kinds, unless some are named; the state first."""
        found = (self.find(node, kind) for kind in (kinds or _KINDS))
        return (part for part in found if part is not None)

    def _note_snapshots(self, changed: Node) -> None:
        """Whether a boundary, and the one before it, are kept for their own sake now."""
        for node in (changed, changed.parent):
            if node is not None:
                own = self._has(node, "state") if self._recurs else self._has(node, "kv") and self._is_leaf(node)
                (self.snapshots.add if own else self.snapshots.discard)(node)

    def _has(self, node: Node, kind: PartKind) -> bool:
        return self.key(kind) in node.parts

    def idle_seconds(self, node: Node) -> float | None:
        """Since a boundary was used last; None where nothing of it is here."""
        return self._clock() - self._last_use(node) if any(self._parts_of(node)) else None

    def _last_use(self, node: Node) -> float:
        """When anything of it was used last, here or elsewhere."""
        return max([node.used_at, *(part.used_at for part in self._parts_of(node))])
