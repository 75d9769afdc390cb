"""Who goes when the budget of a tier is short, against an oracle that looks at all parts anew each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import Boundary
from worker.events import EventLog
from worker.snapshot_index import Node, SnapshotIndex
from worker.tiers.ledger import Ledger, Part

LIMIT = 40


@dataclass
class World:
    """A ledger of a model that recurs or not, what went from it, and the bytes that truly are there."""

    recurs: bool
    index: SnapshotIndex = field(default_factory=lambda: SnapshotIndex(1 << 20))
    gone: list[Part] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.ledger = Ledger(
            "disk", LIMIT, self.index, self.goes, lambda: self.now, EventLog(), recurs=self.recurs
        )
        self.nodes: list[Node] = []
        self.left: dict[Part, None] = {}  # what was there when room was asked for, but for what went since
        self.stays: set[Node] = set()

    def goes(self, part: Part, at_once: bool) -> None:
        """See that no other part should have gone before."""
        inner = [p for p in self.left if self.recurs and p.kind == "state" and self.is_inner(p.node)]
        if inner:
            assert part in inner
            assert self.last_use(part.node) == min(self.last_use(p.node) for p in inner)
        else:
            leaves = {p.node for p in self.left if p.node not in self.stays and not self.below(p.node, "kv", 1)}
            assert part.node in leaves
            assert self.rank(part.node) == min(map(self.rank, leaves))
        del self.left[part]
        self.gone.append(part)

    def below(self, node: Node, kind: str, most: int = 1000) -> list[Node]:
        """Those that extend a boundary by so many others at most, and have such a part."""
        nodes = {p.node for p in self.left if p.kind == kind}
        return [n for n in nodes if n is not node and node in list(n.ancestors())[:most]]

    def is_inner(self, node: Node) -> bool:
        return node not in self.stays and bool(self.below(node, "state")) and len(node.children) < 2

    def rank(self, leaf: Node) -> float:
        kinds = {p.kind for p in self.left if p.node is leaf}
        return float("-inf") if self.recurs and "state" not in kinds else self.last_use(leaf)

    def last_use(self, node: Node) -> float:
        return max([node.used_at, *(p.used_at for p in self.left if p.node is node)])

    def plant(self, parent: Node | None) -> Node:
        start = parent.end if parent else 0
        digest = len(self.nodes).to_bytes(16, "big")
        node = self.index.plant("", parent, Boundary(start + 1, digest, "message", 1), digest[-4:])
        self.nodes.append(node)
        return node

    def fixed(self, protect: set[Node]) -> set[Node]:
        held = protect | self.index.pinned | set(self.ledger.busy)
        return held | {above for node in held for above in node.ancestors()}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), recurs=st.booleans())
def test_no_more_goes_than_must_in_order_and_never_what_is_fixed(data: st.DataObject, recurs: bool):
    world = World(recurs)
    ledger = world.ledger
    for _ in range(data.draw(st.integers(5, 40))):
        world.now += 1
        parents = [node for node in world.nodes if ledger.find(node, "kv") is not None]
        parent = data.draw(st.sampled_from([None, *parents]))
        node = world.plant(parent)
        size = data.draw(st.integers(1, 15))
        protect = {node} | ({parent} if parent else set())
        pinned = data.draw(st.sampled_from([None, None, None, *parents]))
        if pinned is not None:
            world.index.pin(pinned, pinned=not pinned.pinned)
        used = data.draw(st.sampled_from([None, *parents]))
        if used is not None:
            world.index.touch(used, world.now)
        world.left, world.stays = dict(ledger.parts), world.fixed(protect)
        can_go = [part for part in ledger.parts if part.node not in world.stays]
        held = ledger.held
        assert held == sum(part.size for part in ledger.parts) <= LIMIT
        world.gone.clear()
        fits = ledger.room(size, protect)
        assert fits == (held - sum(part.size for part in can_go) + size <= LIMIT)
        assert set(world.gone) <= set(can_go)
        assert world.left.keys() == ledger.parts.keys()
        if not fits:
            assert not world.gone
            continue
        if world.gone:
            assert ledger.held + world.gone[-1].size + size > LIMIT, "the last one need not have gone"
        ledger.add(Part(node, "kv", size, None, world.now))
        if recurs and data.draw(st.booleans()) and ledger.held < LIMIT:
            ledger.add(Part(node, "state", 1, None, world.now))
    assert ledger.held == sum(part.size for part in ledger.parts) <= LIMIT


@settings(max_examples=60, deadline=None)
@given(data=st.data(), recurs=st.booleans())
def test_what_a_choice_needs_alone_leaves_all_others_whole(data: st.DataObject, recurs: bool):
    """After it has gone every other boundary still has all that it is restored from, and nothing useless is left."""
    world = World(recurs)
    ledger = world.ledger
    ledger.limit = 1000
    for _ in range(data.draw(st.integers(1, 12))):
        node = world.plant(data.draw(st.sampled_from([None, *world.nodes])))
        ledger.add(Part(node, "kv", 1, None, 0.0))
    if recurs:
        more = data.draw(st.sets(st.sampled_from(range(len(world.nodes)))))
        for place, node in enumerate(world.nodes):
            if place in more or not node.children:
                ledger.add(Part(node, "state", 1, None, 0.0))
    kept = [node for node in world.nodes if node in ledger.snapshots]
    chosen = {kept[place] for place in data.draw(st.sets(st.sampled_from(range(len(kept)))))}
    others = [node for node in kept if node not in chosen]
    going = ledger.needed_only_by(chosen)
    ledger._freed = lambda part, at_once: world.gone.append(part)
    for part in going:
        ledger.drop(part, "evicted")
    for node in others:
        assert all(ledger.find(each, "kv") for each in (node, *node.ancestors()))
        assert not recurs or ledger.find(node, "state")
    needed = {each for node in others for each in (node, *node.ancestors())}
    for node in chosen:
        assert ledger.find(node, "state") is None
        assert node in needed or ledger.find(node, "kv") is None
