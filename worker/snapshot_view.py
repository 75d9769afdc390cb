"""What an operator sees of slots and snapshots. Reads only: recency, counters and states stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from protocol.control import SlotInfo, TreeNode
from worker.events import DIGEST_HEX
from worker.retention import hold_seconds
from worker.slots import SlotState, Snapshot
from worker.snapshot_index import Node
from worker.snapshots import SnapshotStore, UnknownSlot


def slot_info(store: SnapshotStore, slot: int) -> SlotInfo:
    """Raises `UnknownSlot` for a slot that is free or does not exist."""
    slots = store.slots
    if not 0 <= slot < len(slots) or slots[slot].state is SlotState.FREE:
        raise UnknownSlot(slot)
    return _slot_infos(store, [slot])[0]


def list_slots(store: SnapshotStore, cursor: int = 0, limit: int = 100) -> tuple[list[SlotInfo], int | None, int]:
    """Up to `limit` slots in use from slot `cursor` on, the next page's cursor, and how many are in use."""
    used = [slot for slot in range(len(store.slots)) if store.slots[slot].state is not SlotState.FREE]
    rest = [slot for slot in used if slot >= cursor]
    page, after = rest[: max(limit, 1)], rest[max(limit, 1) :]
    return _slot_infos(store, page), after[0] if after else None, len(used)


def _slot_infos(store: SnapshotStore, chosen: Iterable[int]) -> list[SlotInfo]:
    """The chosen slots, all in use. One that is reserved or being written has no snapshot yet to tell of."""
    parents = {s.slot: s.node.snapshot_above() for s in store.slots.snapshots() if not s.leaving}
    children = Counter(above.slot for above in parents.values() if above)
    now = store.clock()
    infos = []
    for slot in chosen:
        row = store.slots[slot]
        above = parents.get(slot)
        parent_slot = above.slot if above else None
        if row.snapshot is not None:
            info = _snapshot_info(store, row.snapshot, parent_slot, children[slot], now)
        else:
            info = SlotInfo(
                slot, str(row.state), row.generation, "", "", "", 0, 0, 0, 0, 0, False, 0, 0, 0.0, 0.0, None, 0
            )
        infos.append(info)
    return infos


def _snapshot_info(
    store: SnapshotStore, snapshot: Snapshot, parent_slot: int | None, children: int, now: float
) -> SlotInfo:
    row, node = store.slots[snapshot.slot], snapshot.node
    own = sum(1 for block in snapshot.blocks if store.pool.refcount(block) == 1)
    return SlotInfo(
        slot=snapshot.slot,
        state=str(row.state),
        generation=row.generation,
        digest=node.digest.hex()[:DIGEST_HEX],
        tenant=node.tenant,
        kind=node.kind,
        tokens=snapshot.tokens,
        messages=node.messages,
        blocks=len(snapshot.blocks),
        own_bytes=own * store.block_bytes + store.state_bytes,
        total_bytes=len(snapshot.blocks) * store.block_bytes + store.state_bytes,
        pinned=snapshot.pinned,
        busy=row.readers,
        hits=node.hits,
        created_age_seconds=now - snapshot.created_at,
        used_age_seconds=now - node.used_at,
        parent_slot=parent_slot,
        children=children,
        session=snapshot.session,
        hold_seconds=hold_seconds(snapshot),
        tiers=store.tiers.where(node) if store.tiers is not None else [],
    )


def snapshot_tree(store: SnapshotStore, *, stored: bool = False) -> list[TreeNode]:
    """The snapshots that the index names, each after the nearest shallower one of its conversation.

    `stored`: among them what only slower tiers have.
    """
    shown = {s.node: s.slot for s in store.slots.snapshots() if not s.leaving and s.node.slot == s.slot}
    alone = store.tiers.alone() if stored and store.tiers is not None else ()
    children: dict[Node | None, list[Node]] = {}
    for node in sorted((*shown, *alone), key=lambda node: (node.end, shown.get(node, len(store.slots)))):
        above = next((each for each in node.ancestors() if each in shown or each in alone), None)
        children.setdefault(above, []).append(node)
    nodes: list[TreeNode] = []
    pending: list[tuple[Node | None, int, Node]] = [(None, 0, root) for root in reversed(children.get(None, []))]
    while pending:
        parent, level, node = pending.pop()
        nodes.append(_tree_node(store, node, parent, level))
        below = children.get(node, [])
        pending += [(node, level + (len(below) > 1), child) for child in reversed(below)]
    return nodes


def _tree_node(store: SnapshotStore, node: Node, parent: Node | None, level: int) -> TreeNode:
    tiers = store.tiers
    busy = (
        store.slots[node.slot].readers if node.slot is not None else int(tiers is not None and tiers.is_busy(node))
    )
    return TreeNode(
        slot=node.slot,
        parent_slot=parent.slot if parent else None,
        level=level,
        digest=node.digest.hex()[:DIGEST_HEX],
        kind=node.kind,
        tokens=node.end if node.slot is None else node.stored,
        messages=node.messages,
        hits=node.hits,
        pinned=node.pinned,
        busy=busy,
        name=_name(node),
        parent_name=_name(parent),
        tiers=tiers.where(node) if tiers is not None else [],
    )


def _name(node: Node | None) -> str:
    """Of what is in no slot."""
    return "" if node is None or node.slot is not None else node.name
