"""Requests that do not fit together: who waits, who is swapped out, and whom that fails."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from worker.snapshot_finding import Finding


@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("block_tokens", [4, 32])
def test_a_pool_of_almost_nothing_serves_what_fits(blocks, block_tokens):
    rig = Rig(blocks=blocks, block_tokens=block_tokens)
    size = blocks * block_tokens
    for length in (1, block_tokens - 1, block_tokens, size - 2, size - 1):
        request = rig.serve(one(length, length - 1 or 1, tail=1 if length > 1 else 0), max_tokens=2 * size)
        rig.assert_answered(request)
        assert rig.reasons(request) == ["length"]
    assert rig.end(rig.serve(one(7, size - 1))).code == "too_long"


def test_a_prompt_that_fills_the_pool_starts_from_the_snapshot_in_its_way():
    rig = Rig(blocks=6)
    first = prompt(text(1, 18), tail=text(2, 1), head=False)
    rig.serve(first, max_tokens=1)
    assert rig.kept() == [18]
    whole = prompt(text(1, 18), text(3, 4), head=False)
    request = rig.serve(whole, max_tokens=9)
    rig.assert_answered(request)
    assert rig.accepted(request).depth == 18
    assert rig.count("prefixd_requests_total", result="failed") == 0


def crowded(n: int = 1, count: int = 2) -> tuple[Rig, list[str]]:
    """A worker whose requests all fit with their margins, but not with their answers."""
    rig, requests = Rig(blocks=20 * n * count, slots=0, max_running=8), []
    for i in range(count):
        requests.append(rig.generate(one(i, 5), n=n, max_tokens=110))
        rig.turn()
    return rig, requests


def test_the_youngest_is_swapped_out_and_comes_back():
    rig, requests = crowded()
    rig.run()
    for request in requests:
        rig.assert_answered(request)
    assert (
        rig.count("prefixd_swaps_total", direction="out") == rig.count("prefixd_swaps_total", direction="in") > 0
    )
    alone = [rows[0] for rows in rig.runner.decoded[20:] if len(rows) == 1]
    assert alone[0] == (requests[0], 0), "the oldest stays"


@pytest.mark.parametrize(("n", "count"), [(1, 2), (1, 4), (2, 2), (3, 1)])
def test_whoever_comes_back_gets_on_before_it_leaves_again(n, count):
    rig, requests = crowded(n, count)
    made: dict[object, int] = {}

    def swapped():
        for choice in rig.scheduler.running.swapped:
            key = (choice.request.request_id, choice.index)
            if key not in away:
                assert made.get(key) != choice.generated, "swapped out twice with no token between"
                made[key] = choice.generated
        return {(c.request.request_id, c.index) for c in rig.scheduler.running.swapped}

    away: set[object] = set()
    while not rig.scheduler.is_idle:
        away = swapped()
        rig.turn()
    assert made
    rig.check_rest()
    for request in requests:
        rig.assert_answered(request)


def test_new_requests_wait_while_somebody_is_swapped_out():
    rig, _ = crowded()
    rig.turn_until(lambda: rig.scheduler.running.swapped)
    third = rig.generate(one(3, 5), max_tokens=2)
    rig.turn_until(lambda: rig.events(third))
    assert not rig.scheduler.running.swapped
    rig.run()
    rig.assert_answered(third)


@pytest.mark.parametrize("cause", ["disconnect", "stop"])
def test_a_swapped_out_request_can_be_cancelled(cause):
    rig, requests = crowded()
    rig.turn_until(lambda: rig.scheduler.running.swapped)
    rig.cancel(requests[1], cause)
    rig.run()
    rig.assert_answered(requests[0])
    assert rig.reasons(requests[1]) == [{"disconnect": "cancelled", "stop": "stop"}[cause]]


def test_pinned_snapshots_that_hold_too_much_fail_the_request_with_the_numbers():
    rig = Rig(blocks=8)
    rig.serve(one(1, 20))
    rig.ask("pin", slot=0)
    end = rig.end(rig.serve(one(2, 24)))
    assert end.code == "out_of_memory"
    assert "8 blocks of 4 tokens, 3 free" in end.message
    rig.ask("unpin", slot=0)
    rig.assert_answered(rig.serve(one(2, 24)))


def test_pinning_while_others_decode_fails_the_youngest_only():
    rig = Rig(blocks=10)
    rig.serve(one(9, 10), max_tokens=1)
    rig.ask("pin", slot=0)
    old, young = (rig.generate(one(i, 5), max_tokens=20, cache=False) for i in (1, 2))
    rig.run()
    rig.assert_answered(old)
    rig.assert_answered(young)
    assert rig.kept() == [10]


def test_room_is_looked_for_again_only_when_something_was_released(monkeypatch):
    rig = Rig(blocks=12)
    rig.serve(one(1, 12), max_tokens=1)
    rig.generate(one(2, 20), max_tokens=8, cache=False)
    rig.turns(2)
    waiting = rig.generate(one(1, 12), max_tokens=16)
    lookups = []
    lookup = Finding.lookup
    monkeypatch.setattr(Finding, "lookup", lambda *a, **k: lookups.append(a) or lookup(*a, **k))
    rig.turn()
    assert not rig.events(waiting)
    before, node = len(lookups), rig.store.slots[0].snapshot.node
    hits = node.hits
    rig.turns(4)
    assert len(lookups) == before == 1
    assert node.hits == hits
    rig.run()
    assert rig.accepted(waiting).depth == 12
    assert node.hits == hits + 1
    rig.assert_answered(waiting)


def test_a_flush_makes_room_for_who_waits():
    rig = Rig(blocks=12)
    rig.serve(one(1, 16), max_tokens=1)
    rig.ask("pin", slot=0)
    running = rig.generate(one(2, 9), max_tokens=9)
    rig.turns(2)
    waiting = rig.generate(one(3, 12), max_tokens=4)
    rig.turn()
    assert not rig.events(waiting)
    rig.ask("unpin", slot=0)
    rig.ask("flush")
    assert rig.accepted(waiting)
    rig.run()
    rig.assert_answered(running)
