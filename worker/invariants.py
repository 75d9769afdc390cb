"""The invariants of the slot table, index and block references, as a check that can run in production.

Numbers are those of the design. 5, 7, 8 and 9 speak of what happens, not of what is: tests play them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from worker.block_pool import BlockPool
from worker.nearest import ID_BYTES
from worker.slots import SlotState, SlotTable
from worker.snapshot_index import Node, SnapshotIndex

_HOLDING = (SlotState.READY, SlotState.RESTORING)


class InvariantViolation(Exception):
    """State that must not be: a fault of this program. `number` is that of the invariant in the design."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number


def check_invariants(
    slots: SlotTable,
    index: SnapshotIndex,
    pool: BlockPool,
    held: Sequence[int],
    held_count: int,
    reserved: Collection[int],
    sequences: Iterable[Collection[int]] | None,
) -> None:
    """Raises `InvariantViolation`. Takes time in proportion to slots, nodes and blocks.

    `held` and `held_count` are the store's own account of blocks in snapshots, `reserved` the slots of open
    reservations, `sequences` the blocks of every other holder, or None to leave those out.
    """
    nodes = [node for root in index.roots for node in root.subtree() if node is not root]
    _check_entries(slots, nodes)
    _check_lengths(slots, pool, nodes)
    _check_memory_in_use(slots, pool)
    _check_free_list(slots, reserved)
    _check_readers(slots)
    _check_accounts(slots, index, pool, nodes, held, held_count)
    if sequences is not None:
        _check_owners(pool, held, sequences)


def check_states(slots: SlotTable, states: BlockPool | None, others: Iterable[int]) -> None:
    """Every snapshot has a recurrent state of its own, if the model has any, and every entry its holders.

    `others`: what anybody else holds, once for each of them. Raises `InvariantViolation`.
    """
    snapshots = slots.snapshots()
    if states is None:
        _require(
            all(s.state is None for s in snapshots), 2, "a snapshot has a state, but the model does not recur"
        )
        return
    owners = [0] * (states.total_count + 1)
    for snapshot in snapshots:
        if snapshot.state is None:
            raise InvariantViolation(2, f"slot {snapshot.slot} has no recurrent state")
        owners[snapshot.state] += 1
        _require(owners[snapshot.state] == 1, 1, f"two snapshots have the recurrent state {snapshot.state}")
    for entry in others:
        owners[entry] += 1
    for entry, count in enumerate(owners):
        counted = states.refcount(entry)
        _require(counted == count, 10, f"state {entry} has {count} holders, {counted} counted")
    try:
        states.check()
    except AssertionError as error:
        raise InvariantViolation(10, f"states: {error}") from error


def _require(holds: bool, number: int, message: str) -> None:
    if not holds:
        raise InvariantViolation(number, message)


def _check_entries(slots: SlotTable, nodes: Sequence[Node]) -> None:
    named: set[int] = set()
    for node in nodes:
        if node.slot is None:
            continue
        row = slots[node.slot]
        _require(node.slot not in named, 1, f"two entries name slot {node.slot}")
        named.add(node.slot)
        _require(row.state in _HOLDING, 3, f"an entry names slot {node.slot}, which is {row.state}")
        _require(row.generation == node.generation, 1, f"slot {node.slot} was written since its entry was made")
        _require(
            row.snapshot is not None and row.snapshot.node is node, 1, f"slot {node.slot} holds another snapshot"
        )
    for snapshot in slots.snapshots():
        found = snapshot.slot in named
        _require(found != bool(snapshot.leaving), 1, f"snapshot in slot {snapshot.slot}: named {found}")


def _check_lengths(slots: SlotTable, pool: BlockPool, nodes: Sequence[Node]) -> None:
    for node in nodes:
        parent = node.parent
        _require(parent is not None, 2, f"the entry at {node.end} hangs nowhere")
        start = parent.end if parent else 0
        _require(
            (node.end - start) * ID_BYTES == len(node.ids),
            2,
            f"{len(node.ids)} bytes of ids for {start}..{node.end}",
        )
    for snapshot in slots.snapshots():
        tokens, node = snapshot.tokens, snapshot.node
        whole = tokens == node.end
        part = node.end - len(node.ids) // ID_BYTES < tokens < node.end and tokens % pool.block_tokens == 0
        _require(whole or part, 2, f"slot {snapshot.slot} stores {tokens} tokens under a key of {node.end}")
        if not snapshot.leaving:
            _require(whole or not node.snapshots_below, 2, f"a part in slot {snapshot.slot} is extended")
            _require(tokens == node.stored, 2, f"slot {snapshot.slot} stores {tokens} tokens, not {node.stored}")
        _require(
            len(snapshot.blocks) == pool.blocks_for(tokens),
            2,
            f"slot {snapshot.slot} has {len(snapshot.blocks)} blocks for {tokens} tokens",
        )


def _check_memory_in_use(slots: SlotTable, pool: BlockPool) -> None:
    for snapshot in slots.snapshots():
        for block in snapshot.blocks:
            _require(pool.refcount(block) > 0, 3, f"block {block} of slot {snapshot.slot} is free")


def _check_free_list(slots: SlotTable, reserved: Collection[int]) -> None:
    rows = {slot: slots[slot] for slot in range(len(slots))}
    free = slots.free_slots
    _require(len(set(free)) == len(free), 4, "a slot stands twice in the free list")
    _require(
        set(free) == {slot for slot, row in rows.items() if row.state is SlotState.FREE}, 4, "free list and states"
    )
    taken = {slot for slot, row in rows.items() if row.state in (SlotState.RESERVED, SlotState.WRITING)}
    _require(len(set(reserved)) == len(reserved), 4, "two reservations have one slot")
    _require(set(reserved) == taken, 4, f"reserved by somebody {sorted(reserved)}, by state {sorted(taken)}")
    for slot, row in rows.items():
        _require((row.snapshot is not None) == (row.state in _HOLDING), 3, f"slot {slot} is {row.state}")


def _check_readers(slots: SlotTable) -> None:
    for slot in range(len(slots)):
        row = slots[slot]
        busy = row.state is SlotState.RESTORING
        _require(busy == (row.readers > 0), 6, f"slot {slot} is {row.state} with {row.readers} readers")
    for snapshot in slots.snapshots():
        busy = slots[snapshot.slot].readers > 0
        _require(busy or not snapshot.leaving, 6, f"slot {snapshot.slot} is leaving, but nobody holds it back")


def _check_accounts(
    slots: SlotTable,
    index: SnapshotIndex,
    pool: BlockPool,
    nodes: Sequence[Node],
    held: Sequence[int],
    held_count: int,
) -> None:
    counted = [0] * len(held)
    for snapshot in slots.snapshots():
        for block in snapshot.blocks:
            counted[block] += 1
    _require(list(held) == counted, 10, "blocks counted as held by snapshots are not those held")
    _require(held_count == sum(1 for count in counted if count), 10, "the count of blocks held by snapshots")
    for block, count in enumerate(counted):
        _require(pool.refcount(block) >= count, 10, f"block {block}: {count} snapshots hold it, fewer are counted")
    _require(index.node_count == len(nodes), 10, f"{index.node_count} nodes counted, {len(nodes)} there")
    ghosts = sum(index.weight(node) for node in nodes if node.is_ghost)
    _require(index.ghost_bytes == ghosts, 10, f"{index.ghost_bytes} bytes of ghosts counted, {ghosts} there")
    for node in nodes:
        below = sum(child.snapshots_below + (child.slot is not None) for child in node.children.values())
        _require(
            node.snapshots_below == below, 10, f"{node.snapshots_below} snapshots counted below, {below} there"
        )
    try:
        pool.check()
    except AssertionError as error:
        raise InvariantViolation(10, str(error)) from error


def _check_owners(pool: BlockPool, held: Sequence[int], sequences: Iterable[Collection[int]]) -> None:
    owners = list(held)
    for blocks in sequences:
        for block in blocks:
            owners[block] += 1
    for block, count in enumerate(owners):
        _require(
            pool.refcount(block) == count, 10, f"block {block} has {count} holders, {pool.refcount(block)} counted"
        )
