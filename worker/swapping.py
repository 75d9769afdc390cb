"""Sequences to host memory and back, when the pool is dry and no snapshot can go."""

from __future__ import annotations

from worker.block_pool import BlockPool
from worker.metrics import WorkerMetrics
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Running, age
from worker.steps import SwapIn, SwapOut

# For each other sequence, before one comes back: else it would be thrown out again at once.
_ROOM_TO_GROW_BLOCKS = 2


class Swapping:
    """Chooses who leaves and who comes back. What was decoded is never computed again."""

    def __init__(
        self,
        running: Running,
        pool: BlockPool,
        memory: SequenceMemory,
        states: SequenceStates,
        metrics: WorkerMetrics,
    ) -> None:
        self._running = running
        self._pool = pool
        self._memory = memory
        self._states = states
        self._metrics = metrics

    def out(self) -> SwapOut | None:
        """The youngest decoding choice leaves; None where nobody would be left to gain by it."""
        running = self._running
        if len(running.decoding) < 2 and not running.prefilling:
            return None
        victim = max(running.decoding, key=age)
        used = tuple(victim.blocks[: self._pool.blocks_for(victim.length)])
        running.decoding.remove(victim)
        running.swapped.append(victim)
        self._pool.release(victim.blocks)
        victim.blocks = []
        self._metrics.swaps.labels(direction="out").inc()
        return SwapOut(victim, used, self._states.drop_choice(victim))

    def back(self) -> SwapIn | None:
        """The oldest one comes back, if there is room for it and for the others to grow."""
        running = self._running
        if not running.swapped:
            return None
        choice = min(running.swapped, key=age)
        others = len(running.decoding) + len(running.prefilling)
        releases = self._pool.releases + self._states.releases
        if others and choice.no_room_at == releases:
            return None
        needed = self._pool.blocks_for(choice.length + 1)
        if not (self._memory.room(needed + _ROOM_TO_GROW_BLOCKS * others) and self._states.room(1)):
            choice.no_room_at = releases
            return None
        choice.blocks = self._pool.allocate(needed)
        self._states.take_for_choice(choice)
        running.swapped.remove(choice)
        running.decoding.append(choice)
        self._metrics.swaps.labels(direction="in").inc()
        return SwapIn(choice, tuple(choice.blocks[: self._pool.blocks_for(choice.length)]))
