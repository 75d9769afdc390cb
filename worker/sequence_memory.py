"""Blocks for sequences, from the pool or from what snapshots give up."""

from __future__ import annotations

from collections.abc import Callable, Collection

from worker.block_pool import BlockPool
from worker.sequences import Request
from worker.snapshot_clearing import Clearing
from worker.snapshots import SnapshotStore
from worker.steps import Copies


class SequenceMemory:
    """Gets blocks, and makes them a sequence's own before it writes. Nothing shared is ever written."""

    def __init__(
        self, pool: BlockPool, store: SnapshotStore, give_way: Callable[[], bool] = lambda: False
    ) -> None:
        """`give_way` frees what less urgent work holds, before any snapshot goes; false if it holds nothing."""
        self._pool = pool
        self._clearing = Clearing(store)
        self._give_way = give_way

    def room(self, blocks: int, protect: Collection[int] = frozenset()) -> bool:
        """Whether so many blocks are free, or could be made free without the snapshots in `protect`."""
        if self._pool.free_count < blocks:
            self._give_way()
        return self._pool.free_count >= blocks or self._clearing.make_room(blocks, protect)

    def own(self, blocks: list[int], start: int, end: int) -> Copies | None:
        """Make [start, end) writable: append missing blocks, replace shared ones. None without room: no change.

        The copies must be made, in order, before anything else is written: their sources may be free already.
        """
        pool, size = self._pool, self._pool.block_tokens
        span = range(start // size, -(-end // size))
        while True:
            shared = [i for i in span if i < len(blocks) and pool.refcount(blocks[i]) > 1]
            missing = max(span.stop - len(blocks), 0)
            if pool.free_count >= len(shared) + missing:
                break
            if self._give_way():
                continue
            # Either way snapshots that share these very blocks may have gone, so the need is counted again.
            if self._clearing.make_room(len(shared) + missing):
                continue
            if not any(self._clearing.give_up(blocks[i]) for i in shared):
                return None
        copies: list[tuple[int, int]] = []
        for i, fresh in zip(shared, pool.allocate(len(shared)), strict=True):
            if i * size < start:
                copies.append((blocks[i], fresh))
            pool.release([blocks[i]])
            blocks[i] = fresh
        blocks.extend(pool.allocate(missing))
        return tuple(copies)

    def tail_copy(self, request: Request) -> Copies:
        """The copy of a restored partly filled block that the first pass of a request starts with."""
        source = request.tail_source
        if source is None:
            return ()
        request.tail_source = None
        self._pool.release([source])
        return ((source, request.blocks[request.depth // self._pool.block_tokens]),)
