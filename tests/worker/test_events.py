"""What happened to the cache, told by number: nothing is left out without being counted."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from protocol.control import EventPage
from worker.events import EventLog


def page(rig: Rig, **args: object) -> EventPage:
    return TypeAdapter(EventPage).validate_python(rig.ask("events", **args).data)


def told(rig: Rig, after: int = 0) -> list[tuple[str, str, int | None, int]]:
    return [(event.kind, event.cause, event.slot, event.tokens) for event in page(rig, after=after).events]


def numbered(log: EventLog, after: int | None, limit: int = 100) -> tuple[list[int], int, int]:
    found = log.page("e", after, limit)
    return [event.number for event in found.events], found.last, found.missed


def test_lookups_commits_and_evictions_are_told_in_their_order():
    rig = Rig()
    first = prompt(text(1, 10))
    rig.serve(first)
    rig.serve(prompt(text(1, 10), text(2, 10)))
    rig.ask("evict", slots=[0])
    assert told(rig) == [
        ("miss", "cold", None, 0),
        ("commit", "", 0, 10),
        ("hit", "", 0, 10),
        ("commit", "", 1, 20),
        ("evict", "operator", 0, 10),
    ]
    events = page(rig, after=0).events
    assert [event.request_id for event in events] == ["r1", "", "r2", "", ""]
    digest = events[1].digest
    assert len(digest) == 8
    assert [event.digest == digest for event in events] == [False, True, True, False, True]
    assert events[-1].time >= events[0].time > 1e9


def test_a_stale_drop_is_told_before_its_slot_is_freed():
    rig = Rig()
    rig.serve(one(1, 20))
    [node] = [snapshot.node for snapshot in rig.store.slots.snapshots()]
    rig.store.drop_stale(node, "length")
    assert told(rig, after=2) == [("stale", "length", 0, 20), ("evict", "stale", 0, 20)]


def test_a_request_without_the_cache_is_told_as_such():
    rig = Rig()
    rig.generate(one(1, 20), cache=False)
    rig.run()
    assert told(rig) == [("miss", "disabled", None, 0)]


def test_events_come_page_by_page_and_none_twice():
    log = EventLog()
    for _ in range(7):
        log.add("commit")
    assert numbered(log, 0, 3) == ([1, 2, 3], 3, 0)
    assert numbered(log, 3, 3) == ([4, 5, 6], 6, 0)
    assert numbered(log, 6, 3) == ([7], 7, 0)
    assert numbered(log, 7, 3) == ([], 7, 0)
    assert numbered(log, None) == ([], 7, 0)


@pytest.mark.parametrize(("after", "missed", "first"), [(0, 6, 7), (5, 1, 7), (6, 0, 7), (8, 0, 9)])
def test_those_that_are_forgotten_by_now_are_counted(after, missed, first):
    log = EventLog(limit=4)
    for _ in range(10):
        log.add("commit")
    numbers, last, lost = numbered(log, after)
    assert (numbers[0], last, lost) == (first, 10, missed)
    assert len(numbers) + lost == 10 - after


def test_numbers_of_another_epoch_find_nothing():
    log = EventLog()
    log.add("commit")
    assert numbered(log, 500) == ([], 1, 0)


@pytest.mark.parametrize("args", [{"after": -1}, {"after": "1"}, {"after": None}, {"limit": 1.5}])
def test_what_makes_no_sense_is_refused(args):
    assert "must be an integer" in Rig().ask("events", **args).error


def test_recent_requests_come_with_the_last_ones_first():
    rig = Rig(max_running=1)
    for number in (1, 2):
        rig.serve(one(number, 20))
    rig.generate(one(3, 20))
    rig.generate(one(4, 20))
    rig.turn()
    recent = rig.ask("recent").data["requests"]
    explained = rig.ask("explain", request_id="r2").data
    states = ["queued", "prefill", "finished", "finished"]
    assert [(each["request_id"], each["state"]) for each in recent] == list(
        zip(["r4", "r3", "r2", "r1"], states, strict=True)
    )
    assert rig.ask("recent", limit=1).data["requests"][0]["request_id"] == "r4"
    assert recent[2] == {**explained, "age_seconds": recent[2]["age_seconds"]}
