"""The tiers that the settings ask for."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from protocol.sizes import format_size
from worker.config import WorkerSettings
from worker.fingerprint import text_fingerprint
from worker.snapshots import SnapshotStore
from worker.tiers.device_memory import DeviceMemory
from worker.tiers.disk import DiskTier
from worker.tiers.host import HostTier
from worker.tiers.part_file import FORMAT, Identity, PartKind
from worker.tiers.tier import Tier
from worker.tiers.tiers import Tiers

log = logging.getLogger(__name__)


def identity_of(path: Path, model: str, numerics: str) -> Identity:
    """What files of this model are bound to. `model` is the fingerprint of its weights, config and types."""
    text = text_fingerprint(path) if path.is_dir() else ""
    digest = hashlib.blake2b(f"{FORMAT}:{model}:{text}".encode(), digest_size=16)
    return Identity(digest.hexdigest(), numerics)


def open_tiers(
    settings: WorkerSettings,
    store: SnapshotStore,
    device: DeviceMemory,
    identity: Callable[[], Identity],
    wake: Callable[[], None],
    context_tokens: int,
) -> Tiers | None:
    """None where there are none. Raises `SettingsError` where one cannot be had.

    Says so where a snapshot at the full context does not fit.
    """
    tiers: list[Tier] = []
    context_bytes = context_tokens * _bytes(device, "kv") + (_bytes(device, "state") if store.states else 0)
    recurs = store.states is not None
    if len(store.slots) and settings.host_memory:
        tiers.append(HostTier(settings.host_memory, store.index, store.events, store.clock, recurs=recurs))
    if len(store.slots) and settings.disk_cache is not None:
        names = identity()
        log.info("numerics %s, files of %s", names.numerics, names.fingerprint)
        tiers.append(
            DiskTier(
                settings.disk_cache,
                settings.disk_memory,
                names,
                store.index,
                store.events,
                wake,
                store.clock,
                recurs=recurs,
                foreign_numerics=settings.foreign_numerics,
            )
        )
    for tier in tiers:
        if tier.ledger.limit < context_bytes:
            log.warning(
                "%s_memory: %s is less than the %s of one snapshot at the full context of %d tokens: longer "
                "conversations are kept there in part",
                tier.ledger.tier,
                format_size(tier.ledger.limit),
                format_size(context_bytes),
                context_tokens,
            )
    return Tiers(store, device, tiers) if tiers else None


def _bytes(device: DeviceMemory, kind: PartKind) -> int:
    """Of the keys and values of a token, or of a state."""
    return sum(tensor.nbytes for tensor in device.empty(kind, 1).values())
