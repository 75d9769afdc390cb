"""The accounts of the store."""

from __future__ import annotations

import pytest
from snapshot_rig import Engine, chat, found, one_shot

from worker.block_pool import BlockPool
from worker.snapshots import SnapshotStore


def test_no_slots_disable_the_store():
    """K-SM3."""
    engine = Engine(0)
    assert found(engine.play(chat(2))) == (0, "miss", "disabled")
    assert found(engine.play(chat(2))) == (0, "miss", "disabled")
    assert engine.pool.used_count == engine.store.snapshot_bytes == engine.store.index.node_count == 0
    assert engine.clearing.flush().removed == []
    with pytest.raises(ValueError, match="-1"):
        SnapshotStore(-1, BlockPool(4, 4), 100)


def test_snapshots_along_a_conversation_cost_it_once():
    engine = Engine(16)
    for turns in range(1, 8):
        engine.play(chat(turns))
    tokens = 30 + 7 * 20
    assert len(engine.kept()) == 8
    # One block more for each snapshot that ends inside one and was continued.
    assert tokens / 4 <= engine.store.held_count <= tokens / 4 + 8


def test_every_cause_is_counted_from_the_start():
    store = Engine(1).store
    assert set(store.stale_drops) == {"tokens", "generation", "length", "fingerprint", "checksum", "verify"}
    assert set(store.evictions) == {"slots", "blocks", "operator", "flush", "stale", "oom", "states"}
    assert not any([*store.stale_drops.values(), *store.evictions.values(), *store.aborts.values()])
    assert set(store.slot_states()) == {"free", "reserved", "writing", "ready", "restoring", "evicting"}


def test_what_is_remembered_without_state_is_bounded():
    engine = Engine(2, ghost_bytes=20_000)
    for who in range(100):
        engine.play(one_shot(10 + who, 50))
    assert engine.store.index.ghost_bytes <= 20_000
    assert engine.store.index.node_count < 40
