"""From slower tiers to the device: a boundary that a request asks for becomes a snapshot like any other.

One is loaded at a time. Files are read and proved by threads; what has been read is copied a piece at a time between
steps, into blocks that nobody else has. The request waits in the queue meanwhile, and is looked up again at the end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from protocol.messages import Generate
from worker.lookup import Lookup
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.snapshot_index import AbsentReason, Node
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore
from worker.tiers.device_memory import DeviceMemory
from worker.tiers.ledger import Part
from worker.tiers.part_file import BadFile, Tensors
from worker.tiers.tier import Reading, Tier

log = logging.getLogger(__name__)

WINDOW_BYTES = 256 << 20  # of host memory for what has been read, or is being read; one part more at most


class NoRoom(Exception):
    """There is no memory for it now."""


@dataclass(slots=True, eq=False)
class _Step:
    """One part to load. [0, done) of its tokens are on the device."""

    tier: Tier
    part: Part
    reading: Reading | None = None
    done: int = 0

    @property
    def tokens(self) -> int:
        return len(self.part.node.ids) // 4


@dataclass(slots=True, eq=False)
class Load:
    """The way of one boundary to the device, on top of the first `start` tokens, which were there."""

    target: Node
    start: int
    blocks: list[int]
    entry: int | None
    exact: bool
    steps: deque[_Step]
    state: Literal["open", "done", "refused", "lost"] = "open"  # refused: by a part that went for it
    loaded: list[tuple[bytes, int, int, str]] = field(default_factory=list)  # digest, start, end, tier
    tiers: dict[str, None] = field(default_factory=dict)  # that anything came from

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    def has_tried(self, message: Generate) -> bool:
        """Whether all that could be done for a request has been: what it found was not refused."""
        mine = any(boundary.digest == self.target.digest for boundary in message.boundaries)
        return mine and self.state in ("done", "lost")

    def sources(self, message: Generate, depth: int) -> dict[str, int]:
        """How many of a prompt's first `depth` tokens were loaded, by tier."""
        counts: dict[str, int] = {}
        if self.state == "done":
            digests = {boundary.digest for boundary in message.boundaries}
            for digest, start, end, tier in self.loaded:
                if end <= depth and digest in digests:
                    counts[tier] = counts.get(tier, 0) + end - start
        return counts


class Loading:
    """See the module. `tiers` are asked in this order."""

    def __init__(
        self, store: SnapshotStore, device: DeviceMemory, tiers: Sequence[Tier], give_way: Callable[[], bool]
    ) -> None:
        self.open: Load | None = None
        self._store = store
        self._device = device
        self._tiers = tiers
        self._memory = SequenceMemory(store.pool, store, give_way)
        self._states = SequenceStates(store, give_way)
        self._keeping = Keeping(store)
        self._token_bytes = sum(tensor.nbytes for tensor in device.empty("kv", 1).values())

    @property
    def references(self) -> tuple[list[Sequence[int]], list[int]]:
        """The lists of blocks, and the recurrent states, that it holds."""
        load = self.open
        if load is None:
            return [], []
        return [load.blocks], [] if load.entry is None else [load.entry]

    def target(self, chain: Sequence[Node], depth: int, total: int) -> Node | None:
        """The deepest boundary of a request that could be loaded, deeper than what is found on the device."""
        found = None
        for node in chain:
            if node.end <= depth:
                continue
            if node.end >= total or self._find(node, "kv") is None:
                break
            if self._store.states is None or self._find(node, "state") is not None:
                found = node
        return found

    def begin(self, target: Node, found: Lookup) -> Load:
        """Take memory and begin. Raises `NoRoom`, nothing taken."""
        assert self.open is None
        store, pool = self._store, self._store.pool
        source = frozenset() if found.slot is None else frozenset({found.slot})
        tail = found.depth % pool.block_tokens > 0  # the last block, half full, is copied
        needed = pool.blocks_for(target.end) - pool.blocks_for(found.depth) + tail
        if not (self._memory.room(needed, source) and self._states.room(1, source)):
            raise NoRoom
        blocks: list[int] = []
        exact = True
        if found.slot is not None:
            snapshot = store.known(found.slot)
            blocks, exact = list(snapshot.blocks[: pool.blocks_for(found.depth)]), snapshot.exact
            pool.share(blocks)
        copies = self._memory.own(blocks, found.depth, target.end)
        assert copies is not None, "room has been made"
        for source_block, target_block in copies:
            self._device.copy_block(source_block, target_block)
        entry = None if store.states is None else store.states.allocate(1)[0]
        path = [node for node in (*reversed(list(target.ancestors())), target) if node.end > found.depth]
        steps = deque(step for node in path if (step := self._find(node, "kv")) is not None)
        if steps and (begun := found.depth - (path[0].end - steps[0].tokens)) > 0:
            steps[0].done = begun  # so much of it is on the device
        state = self._find(target, "state")
        if state is not None and entry is not None:
            steps.append(state)
        exact = exact and not any(step.part.foreign for step in steps)
        load = Load(target, found.depth, blocks, entry, exact, steps)
        for step in steps:
            step.tier.ledger.busy[step.part.node] += 1
        self.open = load
        return load

    def _find(self, node: Node, kind: Literal["kv", "state"]) -> _Step | None:
        for tier in self._tiers:
            part = tier.find(node, kind)
            if part is not None:
                return _Step(tier, part)
        return None

    def step(self, most_bytes: int) -> bool:
        """Go on with about so many bytes. False where there is nothing to do before a thread has read more."""
        load = self.open
        if load is None:
            return False
        self._read_ahead(load)
        step = load.steps[0]
        assert step.reading is not None
        if not step.reading.is_done:
            return False
        try:
            step.reading.check()
        except BadFile as error:
            self._refuse(load, step, error)
            return True
        self._copy(load, step, step.reading.tensors, most_bytes)
        if step.done == step.tokens:
            self._passed(load, step)
        if not load.steps:
            self._finish(load)
        return True

    def _read_ahead(self, load: Load) -> None:
        held = 0
        for step in load.steps:
            if step.reading is None:
                room = partial(self._device.empty, step.part.kind, step.tokens)
                step.reading = step.tier.read(step.part, room)
            held += step.part.size
            if held >= WINDOW_BYTES:
                return

    def _copy(self, load: Load, step: _Step, tensors: Tensors, most_bytes: int) -> None:
        if step.part.kind == "state":
            assert load.entry is not None
            self._device.write_state(load.entry, tensors)
            step.done = step.tokens
            return
        start = step.part.node.end - step.tokens + step.done
        end = min(step.part.node.end, start + max(most_bytes // self._token_bytes, 1))
        self._device.write(load.blocks, start, end, tensors, step.done)
        step.done += end - start

    def _passed(self, load: Load, step: _Step) -> None:
        """A part is on the device. What came from a slower tier than others stays in those too."""
        load.steps.popleft()
        self._unpin(step)
        node, kind = step.part.node, step.part.kind
        load.tiers[step.tier.ledger.tier] = None
        if kind == "kv":
            start = max(node.end - step.tokens, load.start)
            load.loaded.append((node.digest, start, node.end, step.tier.ledger.tier))
        assert step.reading is not None
        for tier in self._tiers:
            if tier is step.tier:
                break
            if not tier.has_or_writes(node, kind) and not step.part.foreign:
                tier.put(node, kind, step.reading.tensors, (load.target,))

    def _finish(self, load: Load) -> None:
        """Publish what was loaded, unless somebody has computed it meanwhile or no slot is to be had."""
        self.open = None
        store, node = self._store, load.target
        load.state = "done" if node.is_whole else "lost"
        reservation = None
        if node.parent is not None and not node.is_whole:
            reservation = self._keeping.reserve()
        if reservation is not None:
            reservation.state, reservation.exact = load.entry, load.exact
            slot = self._keeping.begin_write(reservation)
            if slot is not None:
                store.index.touch(node, store.clock())
                store.publish(reservation, node, slot, tuple(load.blocks))
                load.state = "done"
                tiers = ",".join(load.tiers)
                store.events.add("load", slot=slot, digest=node.digest, tokens=node.end, tier=tiers)
                return
        self._release(load)

    def _refuse(self, load: Load, step: _Step, error: BadFile) -> None:
        """A part cannot be used: it goes, and what was to be restored by it is not found there any more."""
        node, tier = step.part.node, step.tier
        fingerprint = error.cause == "fingerprint"
        reason: AbsentReason = "fingerprint" if fingerprint else "stale"
        log.warning(
            "%s cache: a part at %d..%d is dropped: %s", tier.ledger.tier, node.end - step.tokens, node.end, error
        )
        tier.failures[error.cause] += 1
        self._store.count_stale(node, "fingerprint" if fingerprint else "checksum")
        self.abandon()
        load.state = "refused"
        tier.ledger.drop(step.part, reason)
        for lost in (load.target, *load.target.ancestors()):
            if lost.end >= node.end and lost.slot is None:
                lost.absent_reason = reason
        self._store.index.trim()

    def abandon(self) -> None:
        """Give up what is being loaded, if anything."""
        load, self.open = self.open, None
        if load is None:
            return
        load.state = "lost"
        for step in load.steps:
            self._unpin(step)
        self._release(load)

    def _release(self, load: Load) -> None:
        self._store.pool.release(load.blocks)
        if self._store.states is not None and load.entry is not None:
            self._store.states.release([load.entry])

    def _unpin(self, step: _Step) -> None:
        busy, node = step.tier.ledger.busy, step.part.node
        busy[node] -= 1
        if not busy[node]:
            del busy[node]
