"""What an operator sees of boundaries that slower tiers have, most of them in no slot. Reads only."""

from __future__ import annotations

from collections.abc import Collection

from protocol.control import StoredInfo, StoredState
from worker.events import DIGEST_HEX
from worker.snapshot_index import Node
from worker.tiers.tiers import Tiers


def find_stored(tiers: Tiers, names: Collection[str]) -> dict[str, Node]:
    """The boundaries of these names, as far as there are any."""
    known = {node.name: node for node in tiers.snapshots()}
    return {name: known[name] for name in names if name in known}


def list_stored(
    tiers: Tiers, cursor: str = "", limit: int = 100, tier: str | None = None
) -> tuple[list[StoredInfo], str | None, int]:
    """Up to `limit` boundaries in order of names from `cursor` on, the next page's cursor, and how many there are.

    Those that are not on the device; or with `tier`, all that it has.
    """
    nodes = tiers.alone() if tier is None else tiers.snapshots(tier)
    named = sorted((node.name, node) for node in nodes)
    rest = [(name, node) for name, node in named if name >= cursor]
    page, after = rest[: max(limit, 1)], rest[max(limit, 1) :]
    infos = [stored_info(tiers, node, tier) for _, node in page]
    return infos, after[0][0] if after else None, len(named)


def stored_info(tiers: Tiers, node: Node, tier: str | None = None) -> StoredInfo:
    """`tier`: the only one whose bytes are counted as its own."""
    parts = tiers.parts_of(node)
    state: StoredState = "stored"
    if not tiers.can_restore(node):
        state = "foreign" if parts is not None else "incomplete"
    return StoredInfo(
        name=node.name,
        state=state,
        digest=node.digest.hex()[:DIGEST_HEX],
        tenant=node.tenant,
        kind=node.kind,
        tokens=node.end,
        messages=node.messages,
        own_bytes=tiers.evict([node], dry_run=True, tier=tier),
        total_bytes=sum(part.size for part in parts or ()),
        pinned=node.pinned,
        busy=int(tiers.is_busy(node)),
        hits=node.hits,
        used_age_seconds=tiers.idle_seconds(node),
        tiers=tiers.holding(node),
        exact=not any(part.foreign for part in parts or ()),
        slot=node.slot,
    )
