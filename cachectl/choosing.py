"""Which snapshots a command is about where no slot is named: by digest, age or tenant, or as many as are too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from cachectl.asking import Asked, all_slots, all_stored, ask
from protocol.control import Removed, SlotInfo, Stats, StoredInfo
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import SettingsError

Row = SlotInfo | StoredInfo
AnyRow = TypeVar("AnyRow", SlotInfo, StoredInfo)


def chosen(client: ControlClient, asked: Asked) -> dict[str, Any]:
    """What to `evict`, as its arguments. Slots that are named are taken as they are, of others only what may go.

    Those that are described go with the generations they were seen at: meanwhile others may have come into them.
    """
    if asked.tier is not None and (asked.slots or asked.digest is not None):
        raise SettingsError("--tier goes with --older, --tenant or --to")
    if asked.slots:
        return {"slots": asked.slots}
    if asked.digest is not None:
        return _as_seen([named(client, asked.digest)])
    if asked.tier is not None:
        there = [row for row in all_stored(client, asked.tier) if not row.pinned and not row.busy]
        return _of_tier(there if asked.to is None else _too_much(client, there, asked.tier, asked.to), asked)
    in_slots = [row for row in all_slots(client) if row.state == "ready" and not row.pinned and not row.busy]
    if asked.to is not None:
        return _as_seen(_least_used(in_slots, lambda rows: _freed(client, rows), _excess(client, asked.to)))
    rows: list[Row] = [*in_slots, *(row for row in all_stored(client) if not row.pinned and not row.busy)]
    return _as_seen([row for row in rows if _matches(row, asked)])


def exported(client: ControlClient, asked: Asked) -> dict[str, Any]:
    """What to `export`, as its arguments: of what is described, that which can be restored."""
    if asked.slots:
        return {"slots": asked.slots}
    if asked.digest is not None:
        return _as_seen([named(client, asked.digest)])
    rows = [row for row in all_stored(client, "disk") if row.state == "stored"]
    return _as_seen([row for row in rows if asked.tenant in (None, row.tenant)])


def named(client: ControlClient, digest: str) -> Row:
    """The only snapshot whose digest begins like this, wherever it is. Raises `CommandRefused`."""
    prefix = digest.lower()
    rows: list[Row] = [*all_slots(client), *all_stored(client)]
    found = [row for row in rows if row.digest and row.digest.startswith(prefix[: len(row.digest)])]
    if len(found) != 1:
        raise CommandRefused(f"digest {prefix} stands for {len(found) or 'no'} snapshots")
    return found[0]


def place(row: Row) -> dict[str, Any]:
    """A snapshot as the argument of a command about one."""
    return {"slot": row.slot} if isinstance(row, SlotInfo) else {"name": row.name}


def _as_seen(rows: Sequence[Row]) -> dict[str, Any]:
    slots = [row for row in rows if isinstance(row, SlotInfo)]
    names = [row.name for row in rows if isinstance(row, StoredInfo)]
    which = {"slots": [row.slot for row in slots], "generations": [row.generation for row in slots]}
    return {**which, "names": names} if names else which


def _of_tier(rows: Sequence[StoredInfo], asked: Asked) -> dict[str, Any]:
    names = [row.name for row in rows if asked.to is not None or _matches(row, asked)]
    return {"slots": [], "names": names, "tier": asked.tier}


def _matches(row: Row, asked: Asked) -> bool:
    if asked.older is not None:
        return row.used_age_seconds > asked.older
    return row.tenant == asked.tenant


def _excess(client: ControlClient, target_bytes: int) -> int:
    return ask(client, Stats, "stats").snapshot_bytes - target_bytes


def _too_much(client: ControlClient, rows: Sequence[StoredInfo], tier: str, target_bytes: int) -> list[StoredInfo]:
    """As `_least_used`, of a slower tier."""
    held = next((each.bytes for each in ask(client, Stats, "stats").tiers if each.tier == tier), 0)

    def freed(some: Sequence[StoredInfo]) -> int:
        names = [row.name for row in some]
        return ask(client, Removed, "evict", slots=[], names=names, tier=tier, dry_run=True).tier_bytes

    return _least_used(rows, freed, held - target_bytes)


def _least_used(rows: Iterable[AnyRow], freed: Callable[[Sequence[AnyRow]], int], excess: int) -> list[AnyRow]:
    """The fewest of those used longest ago, deeper ones first, that free `excess` bytes; all where they do not.

    Snapshots share blocks, so only the worker knows what a set of them frees: it is asked, without removing any.
    """
    if excess <= 0:
        return []
    order = sorted(rows, key=lambda row: (-row.used_age_seconds, -row.tokens))
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if middle and freed(order[:middle]) >= excess:
            high = middle
        else:
            low = middle + 1
    return order[:low]


def _freed(client: ControlClient, rows: Sequence[SlotInfo]) -> int:
    return ask(client, Removed, "evict", **_as_seen(rows), dry_run=True).freed_bytes
