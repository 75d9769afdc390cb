"""The tree of boundaries, one root a tenant: what has been computed, and which slot holds the state, if any.

A node stands for one boundary and keeps the ids since its parent, so a path from the root spells a whole prefix.
Nodes without state, *ghosts*, remember what was computed once: they explain misses and show where conversations
branch. Their memory is bounded; a ghost that nothing extends goes first, least recently used before others. A node of
which a slower tier holds a part is no ghost.

Ids are kept and compared as bytes of int32, never token by token. `data` below is a prompt in that form.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from protocol.messages import Boundary, BoundaryKind
from worker.nearest import BY_IDS, ID_BYTES, most_stored_child, nearest_child

NODE_BYTES = 512  # what a node weighs besides its ids, roughly

AbsentReason = Literal["not_kept", "evicted", "flushed", "stale", "fingerprint"]
PartKey = tuple[Literal["host", "disk"], Literal["kv", "state"]]  # a tier, and what of a boundary it holds


def boundary_name(tenant: str, digest: bytes) -> str:
    """The same for the same boundary; neither the tenant nor the digest can be read from it."""
    state = blake2b(digest, digest_size=16, person=b"prefixd-file")
    state.update(tenant.encode())
    return state.hexdigest()


class Node:
    """One boundary. `slot` and `generation` are set while a snapshot is kept, `absent_reason` counts otherwise."""

    __slots__ = (
        "absent_reason",
        "added",
        "asked_at",
        "asks",
        "before_last",
        "by_ids",
        "children",
        "digest",
        "end",
        "generation",
        "hits",
        "ids",
        "inner",
        "kind",
        "last_used",
        "left_at",
        "messages",
        "parent",
        "parts",
        "pauses",
        "pinned",
        "queued",
        "returned_at",
        "revisited",
        "slot",
        "snapshots_below",
        "standing",
        "stored",
        "tenant",
        "used_at",
    )

    def __init__(self, tenant: str, boundary: Boundary | None, ids: bytes, parent: Node | None) -> None:
        self.tenant = tenant
        self.digest = boundary.digest if boundary else b""
        self.end = boundary.end if boundary else 0
        self.kind: BoundaryKind = boundary.kind if boundary else "head"
        self.messages = boundary.messages if boundary else 0
        self.ids = ids
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.by_ids: list[Node] | None = None  # children in order of ids, once somebody asked
        self.slot: int | None = None
        self.generation = 0
        self.stored = 0  # tokens that the slot holds: less than `end` where the snapshot was cut; 0 without one
        self.parts: dict[PartKey, object] = {}  # in slower tiers, as `worker.tiers` has them
        self.pinned = False  # to be kept in all the places that have it; see `SnapshotIndex.pin`
        self.absent_reason: AbsentReason = "not_kept"
        self.snapshots_below = 0  # nodes with a slot in the subtree, this one not counted
        self.hits = 0
        self.added: int | None = None  # tokens that the request which left it had beyond what was known, if known
        self.left_at: float | None = None  # a prompt, or its answer, last ended here
        # Between requests of the conversation that it ends: how many, by weight, and their logarithms' sum
        self.pauses: tuple[float, float] = parent.pauses if parent else (0.0, 0.0)
        self.asks = 0  # requests whose deepest known boundary this was, with a snapshot or without
        self.revisited = False  # a request asked for it that did not go on like one before
        self.before_last = False  # the last request that had it had one message more, and it is no head
        self.inner = False  # the request that left a snapshot here went on
        self.standing = ""  # as what `Returns` has counted it last
        self.last_used = 0  # rises with every use of any node
        self.used_at = 0.0
        self.returned_at = 0.0  # a request last asked for it; until one does, when a snapshot was left here
        self.asked_at = 0.0  # a request last started from here, or left a snapshot here
        self.queued = False  # stands in the queue of ghosts to forget

    @property
    def name(self) -> str:
        """By which what is in no slot is asked for."""
        return boundary_name(self.tenant, self.digest)

    @property
    def is_branch(self) -> bool:
        return len(self.children) > 1

    @property
    def is_whole(self) -> bool:
        """Whether its slot holds the state at the boundary itself, and not only a part of what leads there."""
        return self.stored == self.end

    @property
    def is_ghost(self) -> bool:
        return self.slot is None and not self.parts

    def ancestors(self) -> Iterator[Node]:
        """From the parent up, the root not included."""
        node = self.parent
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and all below, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def last_begun(self) -> Node:
        """The end of what was last begun on it."""
        node = self
        while node.children:
            node = next(reversed(node.children.values()))
        return node

    def snapshot_above(self) -> Node | None:
        """The nearest ancestor that has a slot."""
        return next((node for node in self.ancestors() if node.slot is not None), None)

    @property
    def has_snapshots(self) -> bool:
        """Whether it has a slot, or anything that extends it."""
        return self.slot is not None or self.snapshots_below > 0

    def nearest_below(self) -> Node:
        """Itself or what extends it, if that has a slot and it has not. It must have either."""
        node = self
        while node.slot is None:
            node = next(child for child in node.children.values() if child.has_snapshots)
        return node

    def spells(self, data: bytes, tokens: int) -> bool:
        """Whether a prompt begins with the first `tokens` tokens of what leads here."""
        if tokens > self.end or tokens * ID_BYTES > len(data):
            return False
        for node in (self, *self.ancestors()):
            start = node.end * ID_BYTES - len(node.ids)
            own = min(tokens * ID_BYTES - start, len(node.ids))
            if own > 0 and not data.startswith(node.ids[:own], start):
                return False
        return True


class Walk(NamedTuple):
    """The nodes of a request's first boundaries, and the node that has the next one's digest but not its ids."""

    chain: list[Node]
    clash: Node | None


class Common(NamedTuple):
    """How far a prompt agrees with the closest stored conversation of its tenant.

    `differs`: both go on after `tokens`, and not alike. `stored_longer`: the prompt ends inside the stored one.
    """

    tokens: int
    differs: bool
    stored_longer: bool


NOTHING_COMMON = Common(0, False, False)


class Part(NamedTuple):
    """A node that has a slot, and how many of a prompt's first tokens that holds."""

    node: Node
    tokens: int


class SnapshotIndex:
    """See the module. Says nothing about memory: slots are only numbers here."""

    def __init__(self, ghost_bytes: int) -> None:
        self._ghost_limit = ghost_bytes
        self._roots: dict[str, Node] = {}
        self._uses = 0
        self._serial = 0
        self._forgettable: list[tuple[int, int, Node]] = []  # heap by last use; checked again when taken
        self.node_count = 0
        self.ghost_bytes = 0
        self.pinned: set[Node] = set()

    @property
    def roots(self) -> Sequence[Node]:
        return tuple(self._roots.values())

    @staticmethod
    def weight(node: Node) -> int:
        """What a ghost counts for, in bytes."""
        return len(node.ids) + NODE_BYTES

    def walk(self, tenant: str, data: bytes, boundaries: Sequence[Boundary]) -> Walk:
        """The longest chain of nodes whose digests, positions and ids are those of the request."""
        chain: list[Node] = []
        node = self._roots.get(tenant)
        if node is None:
            return Walk(chain, None)
        start = 0
        for boundary in boundaries:
            child = node.children.get(boundary.digest)
            if child is None:
                break
            end = boundary.end * ID_BYTES
            if end > len(data):
                break
            if child.end != boundary.end or not data.startswith(child.ids, start):
                return Walk(chain, child)
            chain.append(child)
            node, start = child, end
        return Walk(chain, None)

    def find(self, tenant: str, digest: bytes) -> Node | None:
        """The node of a boundary, known by its name alone. Takes time in proportion to the tenant's nodes."""
        root = self._roots.get(tenant)
        below = root.subtree() if root else iter(())
        return next((node for node in below if node.digest == digest and node is not root), None)

    def extend(
        self,
        tenant: str,
        data: bytes,
        boundaries: Sequence[Boundary],
        chain: Sequence[Node],
        now: float,
        added: int | None = None,
    ) -> Node | None:
        """Add ghosts for the boundaries after `chain`, mark all as used, and return the last one.

        `added`: tokens that the request has beyond what was known before.
        `chain` is what `walk` found for the same request, without a clash. None if there is no boundary.
        Raises `ValueError` for boundaries that do not rise within `data`.
        """
        start = chain[-1].end if chain else 0
        fresh = boundaries[len(chain) :]
        for boundary in fresh:
            if not start < boundary.end <= len(data) // ID_BYTES:
                raise ValueError(f"boundary {boundary.end} does not rise within {len(data) // ID_BYTES} tokens")
            start = boundary.end
        if not fresh and not chain:
            return None
        node = chain[-1] if chain else self._roots.setdefault(tenant, Node(tenant, None, b"", None))
        for boundary in fresh:
            node = self._add(node, boundary, data[node.end * ID_BYTES : boundary.end * ID_BYTES])
            node.added = added
        self.touch(node, now)
        if node.is_ghost and not node.children:
            self._queue(node)
        return node

    def plant(self, tenant: str, parent: Node | None, boundary: Boundary, ids: bytes) -> Node:
        """The node of a boundary that extends `parent`, added if it is not known. Unused as yet.

        Raises `ValueError` where its digest is taken by other ids, or they do not fill what lies between the two.
        """
        above = parent or self._roots.get(tenant) or Node(tenant, None, b"", None)
        known = above.children.get(boundary.digest)
        if known is not None:
            if (known.end, known.ids) != (boundary.end, ids):
                raise ValueError("the digest names other ids")
            return known
        if len(ids) != (boundary.end - above.end) * ID_BYTES or not ids:
            raise ValueError(f"{len(ids)} bytes of ids for {above.end}..{boundary.end}")
        if parent is None:
            self._roots[tenant] = above
        node = self._add(above, boundary, ids)
        node.used_at = float("-inf")  # the clock may have begun later than when it was used
        self._queue(node)
        return node

    def add_part(self, node: Node, key: PartKey, part: object) -> None:
        """A slower tier holds this of the boundary."""
        assert key not in node.parts
        self._count_ghost(node, -1)
        node.parts[key] = part
        self._count_ghost(node, 1)

    def drop_part(self, node: Node, key: PartKey, reason: AbsentReason) -> None:
        """The tier holds it no more: the node may be a ghost again."""
        self._count_ghost(node, -1)
        del node.parts[key]
        self._count_ghost(node, 1)
        if node.slot is None:
            node.absent_reason = reason
        self._may_be_ghost(node)

    def _may_be_ghost(self, node: Node) -> None:
        """Something that was kept of it has gone."""
        if node.is_ghost:
            self.pin(node, pinned=False)
            if not node.children:
                self._queue(node)

    def pin(self, node: Node, *, pinned: bool) -> None:
        """The operator wants it kept, or no longer. A ghost cannot be, and what becomes one is not pinned any more."""
        assert not (pinned and node.is_ghost)
        node.pinned = pinned
        (self.pinned.add if pinned else self.pinned.discard)(node)

    def _count_ghost(self, node: Node, sign: int) -> None:
        if node.is_ghost:
            self.ghost_bytes += sign * self.weight(node)

    def touch(self, node: Node, now: float) -> None:
        """Count as used now, and with it all that it extends."""
        self._uses += 1
        above: Node | None = node
        while above is not None:
            above.last_used = self._uses
            above.used_at = now
            above = above.parent

    def attach(self, node: Node, slot: int, generation: int, stored: int) -> None:
        """A snapshot of this boundary was published, or of the first `stored` tokens before it."""
        assert node.slot is None
        self._count_ghost(node, -1)
        node.slot, node.generation, node.asked_at, node.stored = slot, generation, node.used_at, stored
        if not node.asks:
            node.returned_at = node.used_at
        for above in node.ancestors():
            above.snapshots_below += 1

    def detach(self, node: Node, reason: AbsentReason) -> None:
        """Its snapshot is gone, or no longer to be found: the node stays as a ghost."""
        assert node.slot is not None
        node.slot, node.stored, node.absent_reason = None, 0, reason
        self._count_ghost(node, 1)
        for above in node.ancestors():
            above.snapshots_below -= 1
        self._may_be_ghost(node)

    def remove(self, node: Node) -> None:
        """Forget a node and all below, all of them ghosts."""
        for below in reversed(list(node.subtree())):
            self._forget(below)

    def trim(self) -> None:
        """Forget ghosts that nothing extends, least recently used first, until all fit the limit."""
        while self.ghost_bytes > self._ghost_limit and self._forgettable:
            used, _, node = heapq.heappop(self._forgettable)
            node.queued = False
            if node.parent is None or not node.is_ghost or node.children:
                continue
            if node.last_used != used:
                self._queue(node)
            else:
                self._forget(node)

    def common_prefix(self, tenant: str, data: bytes, chain: Sequence[Node]) -> Common:
        """Follow stored ids as far as they agree with `data`, from the end of `chain` on, boundaries or not."""
        node = chain[-1] if chain else self._roots.get(tenant)
        if node is None:
            return NOTHING_COMMON
        at = node.end * ID_BYTES
        while (nearest := nearest_child(node, data, at)) is not None:
            child, same = nearest
            at += same
            if same < len(child.ids):
                ended = at + ID_BYTES > len(data)
                return Common(at // ID_BYTES, not ended, ended)
            node = child
        return Common(at // ID_BYTES, False, False)

    def most_stored(self, tenant: str, data: bytes, chain: Sequence[Node]) -> Part | None:
        """The snapshot that holds most of a prompt that goes along `chain`, whether that ends at a boundary or not."""
        whole = (
            known for known in reversed(chain) if known.has_snapshots and (known.slot is None or known.is_whole)
        )
        node = next(whole, self._roots.get(tenant))
        if node is None:
            return None
        at = node.end * ID_BYTES
        while (nearest := most_stored_child(node, data, at)) is not None and nearest[1]:
            node, same = nearest
            at += same
            if same < len(node.ids):
                break
        if not at:
            return None
        return Part(node.nearest_below(), at // ID_BYTES)

    def beginning_with(self, tenant: str, data: bytes, tokens: int) -> list[Node]:
        """All boundaries that are reached by way of the first `tokens` tokens of `data`."""
        length = tokens * ID_BYTES
        found: list[Node] = []
        root = self._roots.get(tenant)
        todo = [] if root is None else [root]
        while todo:
            node = todo.pop()
            start = node.end * ID_BYTES
            for child in node.children.values():
                if data.startswith(child.ids[: length - start], start):
                    if child.end >= tokens:
                        found += child.subtree()
                    else:
                        todo.append(child)
        return found

    def _add(self, parent: Node, boundary: Boundary, ids: bytes) -> Node:
        node = Node(parent.tenant, boundary, ids, parent)
        parent.children[boundary.digest] = node
        if parent.by_ids is not None:
            insort(parent.by_ids, node, key=BY_IDS)
        self.node_count += 1
        self.ghost_bytes += self.weight(node)
        return node

    def _forget(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert node.is_ghost
        assert not node.children
        del parent.children[node.digest]
        if parent.by_ids is not None:
            parent.by_ids.remove(node)
        node.parent = None
        self.node_count -= 1
        self.ghost_bytes -= self.weight(node)
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.tenant]
        elif parent.is_ghost:
            self._queue(parent)

    def _queue(self, ghost: Node) -> None:
        if not ghost.queued:
            ghost.queued = True
            self._serial += 1
            heapq.heappush(self._forgettable, (ghost.last_used, self._serial, ghost))
