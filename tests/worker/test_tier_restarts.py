"""Conversations go on from disk in another worker: the real engine on memory of plain Python, where mistakes show."""

from __future__ import annotations

import os
import time

import pytest
from scheduler_rig import one, text
from snapshot_rig import prompt
from tier_rig import ENTRIES, Start, chat


@pytest.mark.parametrize("entries", ENTRIES)
def test_after_a_restart_the_next_turn_hits_at_the_same_depth(start: Start, entries: int):
    rig = start(entries=entries)
    for turns in range(1, 5):
        rig.serve(chat(turns))
    rig.settle()
    rig = start(entries=entries)
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(4).last.end, "hit", "none")
    rig.assert_answered(request)
    assert rig.count("prefixd_cache_tokens_total", source="disk") == chat(4).last.end
    assert rig.count("prefixd_cache_tokens_total", source="device") == 0
    assert rig.count("prefixd_cache_tokens_total", source="computed") == len(chat(5)) - chat(4).last.end
    assert rig.ask("explain", request_id=request).data["sources"] == {"disk": chat(4).last.end}
    rig.settle()


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_every_boundary_that_was_kept_is_found_at_its_own_depth(start: Start, entries: int, turns: int):
    rig = start(entries=entries)
    for kept in (1, 2, 3):
        rig.serve(chat(kept))
    rig.settle()
    rig = start(entries=entries)
    branch = prompt(text(1, 17), *(text(turn + 2, 9) for turn in range(turns)), text(77, 5))
    request = rig.serve(branch)
    assert rig.depth(request) == (chat(turns).last.end, "hit", "none")
    rig.assert_answered(request)


@pytest.mark.parametrize("entries", ENTRIES)
def test_what_was_on_the_device_is_not_loaded_again(start: Start, entries: int):
    rig = start(entries=entries)
    rig.serve(chat(2))
    rig.serve(chat(4))
    rig.settle()
    rig = start(entries=entries)
    rig.serve(prompt(text(1, 17), text(50, 3)))  # brings the head
    assert rig.count("prefixd_cache_tokens_total", source="disk") == 17
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(4).last.end, "hit", "none")
    assert rig.count("prefixd_cache_tokens_total", source="disk") == chat(4).last.end
    assert rig.count("prefixd_cache_tokens_total", source="device") == 17
    rig.assert_answered(request)


def test_what_conversations_share_is_on_disk_once(start: Start):
    rig = start()
    for who in range(5):
        rig.serve(chat(2, who=who))
    rig.settle()
    assert len(rig.disk.ledger.parts) == 1 + 5 * 2


def test_what_left_the_device_comes_back_from_the_disk(start: Start):
    rig = start(slots=2, blocks=24)
    rig.serve(chat(3, who=1))
    rig.settle()
    for who in range(2, 6):
        rig.serve(chat(3, who=who))
        rig.settle()
    request = rig.serve(chat(4, who=1))
    assert rig.depth(request) == (chat(3).last.end, "hit", "none")
    assert rig.count("prefixd_cache_tokens_total", source="disk") > 0
    rig.assert_answered(request)
    rig.settle()


@pytest.mark.parametrize("entries", ENTRIES)
def test_with_every_slot_taken_for_good_a_prompt_is_computed(start: Start, entries: int):
    """S2-e: what is loaded has no slot of its own to pass through, and takes none that is pinned."""
    rig = start(slots=2, entries=entries)
    rig.serve(chat(3))
    rig.settle()
    rig = start(slots=2, entries=entries)
    for who, slot in ((5, 0), (6, 1)):
        rig.serve(one(who, 12))
        rig.ask("pin", slot=slot)
    request = rig.serve(chat(4))
    rig.assert_answered(request)
    assert rig.kept() == [12, 12]
    rig.settle()


def test_a_worker_that_stops_writes_what_is_not_yet_written(start: Start, slowly: None):
    rig = start()
    rig.serve(chat(3))
    assert rig.tiers.pending
    rig.engine.stop()
    rig.engine.run()
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


def test_what_was_used_on_the_device_counts_as_used_after_the_next_start(start: Start):
    """Its file was written long ago, and not read since."""
    rig = start()
    for who, age in ((1, 3000), (2, 2000), (3, 1000)):
        rig.serve(one(who, 12))
        rig.settle()
        (path,) = (p.place.path for p in rig.disk.ledger.parts if p.node.digest == one(who, 12).last.digest)
        os.utime(path, (time.time() - age,) * 2)
    rig.serve(one(1, 12))
    rig.engine.stop()
    rig.engine.run()
    size = rig.disk.ledger.held // 3
    rig = start(disk_bytes=2 * size)
    kept = [one(who, 12).last.digest for who in (1, 3)]
    assert {part.node.digest for part in rig.disk.ledger.parts} == set(kept)
