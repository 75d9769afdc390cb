"""The host tier: parts in host memory, which is pinned where there is a card.

A part is what was copied from the device, or read from disk, kept as it is: nothing is copied for it. Pinned memory
comes in powers of two, and is counted like that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from torch import Tensor

from worker.events import EventLog
from worker.snapshot_index import AbsentReason, Node, SnapshotIndex
from worker.tiers.ledger import Ledger, Part, PartOf
from worker.tiers.part_file import PartKind, Tensors
from worker.tiers.tier import Reading


class HostTier:
    """See the module. A part's place is its tensors."""

    is_full = False
    is_writing = False

    def __init__(
        self,
        limit: int,
        index: SnapshotIndex,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
        *,
        recurs: bool,
    ) -> None:
        self.ledger = Ledger("host", limit, index, lambda part, at_once: None, clock, events, recurs=recurs)
        self.failures: Counter[str] = Counter()
        self.written_bytes = 0
        self._clock = clock

    def find(self, node: Node, kind: PartKind) -> Part | None:
        return self.ledger.find(node, kind)

    def has_or_writes(self, node: Node, kind: PartKind) -> bool:
        return self.find(node, kind) is not None

    def put(self, node: Node, kind: PartKind, tensors: Tensors, protect: Collection[Node]) -> bool:
        size = sum(map(_held_bytes, tensors.values()))
        if not self.ledger.room(size, protect):
            self.failures["no_room"] += 1
            self.ledger.tell("fail", "no_room", node, kind)
            return False
        self.written_bytes += size
        self.ledger.add(Part(node, kind, size, tensors, self._clock()))
        return True

    def read(self, part: Part, to: Callable[[], Tensors]) -> Reading:
        part.used_at = self._clock()
        return Reading(part.place)

    def drop(self, node: Node, reason: AbsentReason) -> None:
        self.ledger.drop_node(node, reason)

    def flush(self, keep: Collection[PartOf]) -> int:
        return self.ledger.flush(keep)

    def collect(self) -> None:
        """What was put is there at once."""

    def close(self) -> None:
        """Memory ends with the process."""


def _held_bytes(tensor: Tensor) -> int:
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_pinned() else tensor.nbytes
