"""The slot table: the state and generation of each slot, and which snapshot it holds.

    FREE -> RESERVED -> WRITING -> READY <-> RESTORING
      ^        |           |         |
      |        v           v         v
      +--------+------- EVICTING <---+

Slots come from a free list: no cursor moves, and a reservation given back changes nothing. Every write bumps
the generation, so that whoever remembers an older one can tell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from worker.snapshot_index import Node

EvictionCause = Literal["slots", "blocks", "states", "operator", "flush", "stale", "oom"]
LeavingCause = EvictionCause | Literal["replaced"]  # by one that holds all that it held: nothing is lost


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    READY = "ready"
    RESTORING = "restoring"
    EVICTING = "evicting"


class IllegalTransition(Exception):
    """A slot was asked to do what its state forbids: a fault of the caller. Nothing changed."""


@dataclass(slots=True)
class Snapshot:
    """What a slot holds: references to the KV blocks of the first `tokens` tokens of one boundary.

    That are all of its tokens, or where states are divisible and room was short some, in whole blocks.

    `state` is its entry of recurrent state, of exactly that position; None for models that do not recur.
    `leaving` is set once the index no longer names it: it goes when its last reader is done.
    """

    slot: int
    node: Node
    blocks: tuple[int, ...]
    tokens: int
    created_at: float
    absorbed: bool  # an answer, kept in idle time in case the client sends it back
    state: int | None = None
    exact: bool = True  # False where any of it was computed with other numerics
    leaving: LeavingCause | None = None
    session: str = ""  # hints of clients: see `worker.retention`
    hold_seconds: float = 0.0  # of the client's mark

    @property
    def pinned(self) -> bool:
        """Its boundary is to be kept, says the operator."""
        return self.node.pinned

    @property
    def unproven(self) -> bool:
        """An absorbed answer that no request has started from, and nothing was built on."""
        return self.absorbed and not self.node.hits and not self.node.snapshots_below


@dataclass(slots=True)
class Slot:
    """One row. `readers` restore from it now; above 0 exactly while RESTORING."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    readers: int = 0
    snapshot: Snapshot | None = None  # while READY, RESTORING or EVICTING


@dataclass(slots=True, eq=False)
class Reservation:
    """The right to one slot: a free one, or None while one must be emptied for it when the write begins.

    `newcomer` is what its tokens cost to compute from the one that it `extends`, once known, and `share` how many of
    its like are asked for again; what stands inside a prompt counts as extending others too. `node` is that of its
    boundary, if that is known. `source` is the slot of the one it extends, once a commit follows at once; `absorbed`
    and `exact` as those of the snapshot to be; `written` is set from the beginning of the write on, and where models
    recur so is `state`: the entry that the write fills. A `late` one has a state before its write begins, no slot
    until the commit, and no promise of one.
    """

    slot: int | None
    protect: frozenset[int]
    source: int | None = None
    newcomer: float | None = None
    share: float = 1.0
    extends: bool = False
    node: Node | None = None
    absorbed: bool = False
    written: bool = False
    state: int | None = None
    late: bool = False
    exact: bool = True


class SlotTable:
    """`n` slots; 0 means that nothing is ever kept."""

    def __init__(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"{n} slots are nonsense: 0 disables caching")
        self._slots = [Slot() for _ in range(n)]
        self._free = deque(range(n))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The free list, in the order in which slots will be reserved."""
        return tuple(self._free)

    def __getitem__(self, slot: int) -> Slot:
        """The row, for reading only. Raises `IndexError` for no such slot."""
        if slot < 0:
            raise IndexError(slot)
        return self._slots[slot]

    def counts(self) -> dict[str, int]:
        """Slots by state, every state present."""
        counts = {str(state): 0 for state in SlotState}
        for slot in self._slots:
            counts[slot.state] += 1
        return counts

    def snapshots(self) -> list[Snapshot]:
        """All that are held, in order of slots."""
        return [row.snapshot for row in self._slots if row.snapshot is not None]

    def reserve(self) -> int | None:
        """FREE -> RESERVED for the next slot of the free list; None if there is none."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._move(slot, SlotState.RESERVED, SlotState.FREE)
        return slot

    def give_back(self, slot: int) -> None:
        """RESERVED -> FREE, nothing written: the free list is as it was before."""
        self._move(slot, SlotState.FREE, SlotState.RESERVED)
        self._free.appendleft(slot)

    def begin_write(self, slot: int) -> int:
        """RESERVED -> WRITING; returns the new generation."""
        row = self._move(slot, SlotState.WRITING, SlotState.RESERVED)
        row.generation += 1
        return row.generation

    def publish(self, snapshot: Snapshot) -> None:
        """WRITING -> READY."""
        row = self._move(snapshot.slot, SlotState.READY, SlotState.WRITING)
        row.snapshot = snapshot

    def acquire(self, slot: int) -> None:
        """One more reader: READY or RESTORING -> RESTORING."""
        row = self._move(slot, SlotState.RESTORING, SlotState.READY, SlotState.RESTORING)
        row.readers += 1

    def release(self, slot: int) -> None:
        """One reader less; the last one leaves the slot READY."""
        row = self[slot]
        last = row.readers == 1
        self._move(slot, SlotState.READY if last else SlotState.RESTORING, SlotState.RESTORING)
        row.readers -= 1

    def begin_evict(self, slot: int) -> None:
        """WRITING or READY -> EVICTING. A slot with readers cannot go."""
        self._move(slot, SlotState.EVICTING, SlotState.WRITING, SlotState.READY)

    def finish_evict(self, slot: int) -> None:
        """EVICTING -> FREE, once no index entry names it and its references are given back."""
        row = self._move(slot, SlotState.FREE, SlotState.EVICTING)
        row.snapshot = None
        self._free.append(slot)

    def _move(self, slot: int, to: SlotState, *allowed: SlotState) -> Slot:
        row = self[slot]
        if row.state not in allowed:
            raise IllegalTransition(f"slot {slot} cannot go from {row.state} to {to}")
        row.state = to
        return row
