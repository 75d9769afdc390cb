"""From the device to slower tiers: every snapshot is copied soon after it was kept, a piece at a time between steps.

While one is copied it holds references, so that nobody writes to its blocks; a request that is short of memory takes
them back, and the copy begins anew later. A snapshot that goes before its turn has come is not copied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from worker.slots import Snapshot
from worker.snapshot_index import Node
from worker.snapshots import SnapshotStore
from worker.tiers.device_memory import DeviceMemory
from worker.tiers.part_file import PartKind, Tensors
from worker.tiers.tier import Tier


@dataclass(slots=True, eq=False)
class _Copy:
    """One snapshot on its way: `missing` parts, of which the first is being copied and has `done` tokens."""

    node: Node
    blocks: tuple[int, ...]
    entry: int | None
    path: frozenset[Node]
    missing: deque[tuple[Node, PartKind]]
    part: Tensors = field(default_factory=dict)
    done: int = 0


class WriteBehind:
    """See the module. `tiers` get what they lack."""

    def __init__(self, store: SnapshotStore, device: DeviceMemory, tiers: Sequence[Tier]) -> None:
        self.failures: Counter[str] = Counter()
        self._store = store
        self._device = device
        self._tiers = tiers
        self._queue: dict[Node, None] = {}
        self._copy: _Copy | None = None
        self._token_bytes = sum(tensor.nbytes for tensor in device.empty("kv", 1).values())

    @property
    def pending(self) -> int:
        """Snapshots that are not copied yet."""
        return len(self._queue) + (self._copy is not None)

    @property
    def waiting(self) -> list[Node]:
        """Those of `pending`."""
        return [*self._queue, *([self._copy.node] if self._copy else [])]

    @property
    def references(self) -> tuple[list[Sequence[int]], list[int]]:
        """The lists of blocks, and the recurrent states, that it holds."""
        copy = self._copy
        if copy is None:
            return [], []
        return [copy.blocks], [] if copy.entry is None else [copy.entry]

    def add(self, node: Node) -> None:
        """Its snapshot was kept."""
        self._queue[node] = None

    def give_way(self) -> bool:
        """Take back what is being copied, for later; false if nothing is."""
        copy = self._end()
        if copy is not None:
            self._queue[copy.node] = None
        return copy is not None

    def drop(self, nodes: Collection[Node]) -> None:
        """These are not to be copied."""
        for node in nodes:
            self._queue.pop(node, None)
        if self._copy is not None and self._copy.node in nodes:
            self._end()

    def step(self, most_bytes: int) -> bool:
        """Copy about so many bytes. False if there is nothing to do, or no tier takes any more now."""
        if any(tier.is_full for tier in self._tiers):
            return False
        copy = self._copy or self._begin()
        if copy is None:
            return False
        node, kind = copy.missing[0]
        tokens = len(node.ids) // 4
        if not copy.part:
            copy.part = self._device.empty(kind, tokens)
        if kind == "state":
            assert copy.entry is not None
            self._device.read_state(copy.entry, copy.part)
            copy.done = tokens
        else:
            start = node.end - tokens + copy.done
            end = min(node.end, start + max(most_bytes // self._token_bytes, 1))
            self._device.read(copy.blocks, start, end, copy.part, copy.done)
            copy.done += end - start
        if copy.done == tokens:
            self._hand_over(copy)
        return True

    def _begin(self) -> _Copy | None:
        """The next one that is still there and not in all tiers."""
        while self._queue:
            node = next(iter(self._queue))
            del self._queue[node]
            snapshot = self._snapshot(node)
            if snapshot is None:
                self.failures["gone"] += 1
                self._store.events.add("fail", "gone", digest=node.digest, tokens=node.end)
                continue
            path = [*reversed(list(node.ancestors())), node]
            missing: deque[tuple[Node, PartKind]] = deque((n, "kv") for n in path if self._lacking(n, "kv"))
            if snapshot.state is not None and self._lacking(node, "state"):
                missing.append((node, "state"))
            if not missing:
                continue
            self._store.pool.share(snapshot.blocks)
            if self._store.states is not None and snapshot.state is not None:
                self._store.states.share([snapshot.state])
            self._copy = _Copy(node, snapshot.blocks, snapshot.state, frozenset(path), missing)
            return self._copy
        return None

    def _snapshot(self, node: Node) -> Snapshot | None:
        if node.slot is None or not node.is_whole or node.parent is None or self._store.fault(node) is not None:
            return None
        return self._store.known(node.slot)

    def _lacking(self, node: Node, kind: PartKind) -> list[Tier]:
        return [tier for tier in self._tiers if not tier.has_or_writes(node, kind)]

    def _hand_over(self, copy: _Copy) -> None:
        """A part is complete: give it to those who lack it. Where one has no room, it gets nothing of what follows."""
        node, kind = copy.missing.popleft()
        for tier in self._lacking(node, kind):
            if not self._extends(tier, node, kind):
                self.failures["no_room"] += 1
                tier.ledger.tell("fail", "no_room", node, kind)
            else:
                tier.put(node, kind, copy.part, copy.path)
        copy.part, copy.done = {}, 0
        if not copy.missing:
            self._end()

    def _extends(self, tier: Tier, node: Node, kind: PartKind) -> bool:
        """Whether a tier has what a part is of no use without."""
        if kind == "state":
            return tier.has_or_writes(node, "kv")
        parent = node.parent
        return parent is None or parent.parent is None or tier.has_or_writes(parent, "kv")

    def _end(self) -> _Copy | None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self._store.pool.release(copy.blocks)
            if self._store.states is not None and copy.entry is not None:
                self._store.states.release([copy.entry])
        return copy
