"""Which snapshots `evict` removes where none is named: by digest, age or tenant, or as many as are too much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachectl.asking import Asked, all_slots, ask
from protocol.control import Removed, SlotInfo, Stats
from protocol.control_client import CommandRefused, ControlClient


def chosen(client: ControlClient, asked: Asked) -> dict[str, list[int]]:
    """What to `evict`, as its arguments. Slots that are named are taken as they are, of others only what may go.

    Those that are described go with the generations they were seen at: meanwhile others may have come into them.
    """
    if asked.slots:
        return {"slots": asked.slots}
    if asked.digest is not None:
        return _as_seen([_named(client, asked.digest.lower())])
    removable = [row for row in all_slots(client) if row.state == "ready" and not row.pinned and not row.busy]
    if asked.to is not None:
        return _as_seen(_least_used(client, removable, asked.to))
    return _as_seen([row for row in removable if _matches(row, asked)])


def _as_seen(rows: Sequence[SlotInfo]) -> dict[str, list[int]]:
    return {"slots": [row.slot for row in rows], "generations": [row.generation for row in rows]}


def _matches(row: SlotInfo, asked: Asked) -> bool:
    if asked.older is not None:
        return row.used_age_seconds > asked.older
    return row.tenant == asked.tenant


def _named(client: ControlClient, digest: str) -> SlotInfo:
    """The only snapshot whose digest begins like this. Raises `CommandRefused`."""
    found = [row for row in all_slots(client) if row.digest and row.digest.startswith(digest[: len(row.digest)])]
    if len(found) != 1:
        raise CommandRefused(f"digest {digest} stands for {len(found) or 'no'} snapshots")
    return found[0]


def _least_used(client: ControlClient, removable: Iterable[SlotInfo], target_bytes: int) -> list[SlotInfo]:
    """The fewest of those used longest ago, deeper ones first, without which snapshots hold `target_bytes` at most.

    Snapshots share blocks, so only the worker knows what a set of them frees: it is asked, without removing any.
    """
    excess = ask(client, Stats, "stats").snapshot_bytes - target_bytes
    if excess <= 0:
        return []
    order = sorted(removable, key=lambda row: (-row.used_age_seconds, -row.tokens))
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if _freed(client, order[:middle]) >= excess:
            high = middle
        else:
            low = middle + 1
    return order[:low]


def _freed(client: ControlClient, rows: Sequence[SlotInfo]) -> int:
    return ask(client, Removed, "evict", **_as_seen(rows), dry_run=True).freed_bytes if rows else 0
