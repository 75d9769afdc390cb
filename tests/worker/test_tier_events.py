"""What happens to slower tiers is told among the events of the cache, with its cause."""

from __future__ import annotations

import errno

import pytest
from scheduler_rig import one
from tier_rig import ENTRIES, Start, TierRig, break_file, chat

from protocol.control import CacheEvent


def told(rig: TierRig, *kinds: str, after: int = 0) -> list[CacheEvent]:
    events = rig.store.events.page("e", after, 1000).events
    return [event for event in events if event.kind in kinds]


@pytest.mark.parametrize("entries", ENTRIES)
def test_every_part_that_is_written_is_told(start: Start, entries: int):
    rig = start(entries=entries, host_bytes=1 << 20)
    rig.serve(chat(2))
    rig.settle()
    for tier in ("host", "disk"):
        written = [(event.part, event.tokens) for event in told(rig, "write") if event.tier == tier]
        keys = [("kv", boundary.end) for boundary in chat(2).boundaries]
        states = [("state", end) for end in rig.kept()] if entries else []
        assert sorted(written) == sorted([*keys, *states])
    assert not told(rig, "drop", "fail", "load")


def test_an_eviction_says_which_tier_still_has_it_and_loading_where_it_came_from(start: Start):
    rig = start(slots=2, blocks=24, host_bytes=1 << 20)
    rig.serve(chat(3, who=1))
    rig.settle()
    for who in range(2, 6):
        rig.serve(chat(3, who=who))
        rig.settle()
    assert {event.tier for event in told(rig, "evict") if event.cause in ("slots", "blocks")} == {"host"}
    rig.serve(chat(4, who=1))
    (load,) = told(rig, "load")
    assert (load.tier, load.tokens) == ("host", chat(3).last.end)
    events = told(rig, "commit", "load")
    assert (events[events.index(load) - 1].slot, events[events.index(load) - 1].digest) == (load.slot, load.digest)
    rig = start(slots=2, blocks=24)
    rig.serve(chat(4, who=1))
    assert [event.tier for event in told(rig, "load")] == ["disk"]
    written = [event.tokens for event in told(rig, "write")]
    assert set(written) <= {chat(4).last.end}, "what is found at the start was not written now"


def test_what_never_reached_a_tier_is_evicted_for_good(start: Start):
    rig = start(disk_bytes=100)
    rig.serve(one(1, 12))
    rig.settle()
    rig.ask("evict", slots=[0])
    (event,) = told(rig, "evict")
    assert (event.cause, event.tier) == ("operator", "")
    assert {(event.cause, event.tier) for event in told(rig, "fail")} == {("no_room", "disk")}


def test_what_goes_from_a_tier_is_told_with_its_cause(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.serve(one(5, 8))
    rig.settle()
    slot = next(s.slot for s in rig.store.slots.snapshots() if s.node.end == 8)
    rig.ask("evict", slots=[slot])
    assert [(event.cause, event.tokens) for event in told(rig, "drop")] == [("evicted", 8)]
    rig.ask("flush")
    assert [event.cause for event in told(rig, "drop")][1:] == ["flushed"] * 3
    rig.disk.ledger.limit = 3000
    for who in range(3, 9):
        rig.serve(one(who, 12))
        rig.settle()
    evicted = [event for event in told(rig, "drop") if event.cause == "evicted"][1:]
    assert len(evicted) == rig.disk.ledger.evictions > 0


def test_a_part_that_breaks_is_told_as_stale_and_dropped(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    rig = start()
    (part,) = (p for p in rig.disk.ledger.parts if p.node.end == chat(2).last.end)
    break_file(part.place.path, "flipped")
    rig.serve(chat(3))
    assert [(event.kind, event.cause) for event in told(rig, "stale", "drop")] == [
        ("stale", "checksum"),
        ("drop", "stale"),
    ]


def test_a_write_that_fails_is_told(start: Start, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rig = start()
    monkeypatch.setattr("worker.tiers.part_file.os.replace", full)
    rig.serve(one(1, 12))
    rig.settle()
    assert [(event.cause, event.tier, event.part) for event in told(rig, "fail")] == [("disk_full", "disk", "kv")]
    assert rig.tiers.failures() == dict.fromkeys(rig.tiers.failures(), 0) | {"disk_full": 1}
