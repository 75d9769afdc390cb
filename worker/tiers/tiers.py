"""All tiers of one worker, as the scheduler, the engine and the operator see them. On the engine's thread only."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence

from protocol.control import TierInfo
from protocol.messages import Boundary, Generate
from worker.lookup import Lookup
from worker.snapshot_index import AbsentReason, Node
from worker.snapshots import SnapshotStore
from worker.tiers.device_memory import DeviceMemory
from worker.tiers.disk import DiskTier
from worker.tiers.ledger import Part, PartOf, needed_by
from worker.tiers.loading import Load, Loading
from worker.tiers.part_file import PartKind
from worker.tiers.tier import Tier
from worker.tiers.transfer import Transfers
from worker.tiers.write_behind import WriteBehind

_IDLE_BYTES = 16 << 20  # copied at a time while nobody waits
_BUSY_BYTES = 1 << 20  # and while others compute
_BUSY_SHARE = 0.1  # of the time that others compute goes to copying, once a piece has been copied
_WAIT_SECONDS = 0.002


class Tiers:
    """With no tiers at all nothing is ever copied, and nothing found."""

    def __init__(
        self,
        store: SnapshotStore,
        device: DeviceMemory,
        tiers: Sequence[Tier],
    ) -> None:
        """`tiers`, the fastest first."""
        self.tiers = tuple(tiers)
        self.disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        self._store = store
        self._write_behind = WriteBehind(store, device, self.tiers)
        self._loading = Loading(store, device, self.tiers, self.give_way)
        self.transfers = None if self.disk is None else Transfers(self.disk, recurs=store.states is not None)
        self._turned = time.perf_counter()
        store.tiers = self
        if self.disk is not None:
            for cause, count in self.disk.refused.items():
                store.stale_drops[cause] += count

    # What the store tells

    def kept(self, node: Node) -> None:
        """A snapshot was published. What is not exact stays where it is."""
        if self.tiers and node.slot is not None and self._store.known(node.slot).exact:
            self._write_behind.add(node)

    def forget(self, nodes: Collection[Node], reason: AbsentReason) -> None:
        """What is held of these is not to be trusted, or its node goes."""
        self._write_behind.drop(nodes)
        if self._loading.open is not None and self._loading.open.target in nodes:
            self._loading.abandon()
        for tier in self.tiers:
            for node in nodes:
                tier.drop(node, reason)

    # What the scheduler asks

    @property
    def is_loading(self) -> bool:
        return self._loading.open is not None

    @property
    def references(self) -> tuple[list[Sequence[int]], list[int]]:
        """The lists of blocks, and the recurrent states, that are held from here."""
        (copied, states), (loaded, more) = self._write_behind.references, self._loading.references
        return [*copied, *loaded], [*states, *more]

    def give_way(self) -> bool:
        """Free what is being copied to slower tiers; false if nothing is."""
        return self._write_behind.give_way()

    def promote(self, message: Generate, found: Lookup) -> Load | None:
        """Begin to load a boundary that is deeper than what was found, or say what has to end before it can begin.

        None where there is none. Raises `NoRoom`.
        """
        if not self.tiers:
            return None
        chain = self._store.index.walk(message.tenant, message.token_ids.tobytes(), message.boundaries).chain
        target = self._loading.target(chain, found.depth, len(message.token_ids))
        if target is None:
            return None
        return self._loading.open or self._loading.begin(target, found)

    def refused(
        self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], depth: int
    ) -> tuple[int, AbsentReason] | None:
        """The deepest boundary deeper than `depth` whose file was found at the start and refused, and why."""
        if self.disk is not None and self.disk.refusals:
            for boundary in reversed(boundaries):
                if depth < boundary.end < len(token_ids):
                    reason = self.disk.refusal(tenant, boundary.digest)
                    if reason is not None:
                        return boundary.end, reason
        return None

    # What the engine does

    def turn(self, *, idle: bool) -> bool:
        """Go on between two steps. False if there is nothing to do now; a thread may still be at work.

        While others compute it takes a share of their time, so that copies keep up with what is computed.
        """
        if not self.tiers:
            return False
        for tier in self.tiers:
            tier.collect()
        if self.transfers is not None:
            self.transfers.collect()
        started = time.perf_counter()
        until = started if idle else started + _BUSY_SHARE * (started - self._turned)
        size = _IDLE_BYTES if idle else _BUSY_BYTES
        while True:
            # Somebody waits for what is loaded, and nobody for what is written.
            more = self._loading.step(4 * size) or self._write_behind.step(size)
            self._turned = time.perf_counter()
            if not more or self._turned >= until:
                return more

    def finish(self, seconds: float) -> int:
        """Write what is not yet written, for so long at most; returns how many snapshots were not."""
        self._loading.abandon()
        deadline = time.monotonic() + seconds
        while self._is_writing and time.monotonic() < deadline:
            if not self.turn(idle=True):
                time.sleep(_WAIT_SECONDS)
        self._write_behind.give_way()
        if self.disk is not None:
            self.disk.note_use()
        return self._write_behind.pending

    @property
    def _is_writing(self) -> bool:
        return self._write_behind.pending > 0 or any(tier.is_writing for tier in self.tiers)

    def close(self) -> None:
        """Call it once nothing else will be asked."""
        if self.transfers is not None:
            self.transfers.close()
        for tier in self.tiers:
            tier.close()

    # What the operator asks

    @property
    def pending(self) -> int:
        """Snapshots that are not in all tiers yet."""
        return self._write_behind.pending

    def infos(self) -> list[TierInfo]:
        """What each holds."""
        infos = []
        for tier in self.tiers:
            ledger, kept = tier.ledger, tier.ledger.snapshots
            alone = sum(node.slot is None for node in kept)
            infos.append(TierInfo(ledger.tier, ledger.held, ledger.limit, len(kept), ledger.evictions, alone))
        return infos

    def held_bytes(self) -> dict[str, int]:
        """By tier, those that there are."""
        return {tier.ledger.tier: tier.ledger.held for tier in self.tiers}

    def evictions(self) -> dict[str, int]:
        """By tier, those that there are."""
        return {tier.ledger.tier: tier.ledger.evictions for tier in self.tiers}

    def written_bytes(self) -> dict[str, int]:
        """By tier, those that there are."""
        return {tier.ledger.tier: tier.written_bytes for tier in self.tiers}

    def failures(self) -> dict[str, int]:
        """What could not be written or read, by cause."""
        counts = dict.fromkeys(FAILURE_CAUSES, 0)
        for counter in (self._write_behind.failures, *(tier.failures for tier in self.tiers)):
            for cause, count in counter.items():
                counts[cause] += count
        return counts

    def where(self, node: Node) -> list[str]:
        """The tiers that hold all that is needed of this boundary itself."""
        return [tier.ledger.tier for tier in self.tiers if tier.find(node, self._own_kind) is not None]

    @property
    def _own_kind(self) -> PartKind:
        """The part that a boundary does not share with those that extend it, if its model has any such."""
        return "kv" if self._store.states is None else "state"

    def can_restore(self, node: Node) -> bool:
        """Whether some tier has each part that is needed."""
        has_state = self._store.states is None or self._has(node, "state")
        return has_state and all(self._has(each, "kv") for each in (node, *node.ancestors()))

    def _has(self, node: Node, kind: PartKind) -> bool:
        return any(tier.find(node, kind) is not None for tier in self.tiers)

    def is_busy(self, node: Node) -> bool:
        """Whether it is being loaded."""
        return any(node in tier.ledger.busy for tier in self.tiers)

    def snapshots(self, tier: str | None = None) -> set[Node]:
        """Boundaries that were kept for their own sake, in a tier or in any."""
        return {node for each in self.tiers if tier in (None, each.ledger.tier) for node in each.ledger.snapshots}

    def alone(self) -> set[Node]:
        """Of these, those that are no longer on the device."""
        return {node for node in self.snapshots() if node.slot is None}

    def parts_of(self, node: Node) -> list[Part] | None:
        """All that it would be restored from, whether it may be or not; None where something is missing."""
        wanted: list[PartOf] = [(each, "kv") for each in (node, *node.ancestors())]
        if self._store.states is not None:
            wanted.append((node, "state"))
        parts: list[Part] = []
        for each, kind in wanted:
            found = (tier.find(each, kind) or tier.ledger.find(each, kind) for tier in self.tiers)
            part = next((part for part in found if part is not None), None)
            if part is None:
                return None
            parts.append(part)
        return parts

    def holding(self, node: Node) -> list[str]:
        """As `where`, whether it may be used or not."""
        kind = self._own_kind
        return [tier.ledger.tier for tier in self.tiers if tier.ledger.find(node, kind) is not None]

    def idle_seconds(self, node: Node) -> float:
        """Since any of it was used last, in a tier or on the device."""
        ages = [tier.ledger.idle_seconds(node) for tier in self.tiers]
        return min(age for age in ages if age is not None)

    def evict(self, nodes: Collection[Node], *, dry_run: bool = False, tier: str | None = None) -> int:
        """What only these boundaries need goes from all tiers, or from one; returns the bytes that came free."""
        if not dry_run and tier is None:
            self._write_behind.drop(nodes)
        freed = 0
        for each in self.tiers:
            if tier in (None, each.ledger.tier):
                for part in each.ledger.needed_only_by(nodes):
                    freed += part.size
                    if not dry_run:
                        each.ledger.drop(part, "evicted")
        return freed

    def flush(self, keep: Collection[Node], *, dry_run: bool = False) -> int:
        """Everything goes but what these boundaries need; returns the bytes that came free."""
        needed = needed_by(keep)
        if dry_run:
            parts = (part for tier in self.tiers for part in tier.ledger.parts)
            return sum(part.size for part in parts if (part.node, part.kind) not in needed)
        self._loading.abandon()
        self._write_behind.drop([node for node in self._write_behind.waiting if node not in keep])
        return sum(tier.flush(needed) for tier in self.tiers)


FAILURE_CAUSES = ("no_room", "gone", "disk_full", "unwritable", "checksum", "fingerprint", "unreadable")
